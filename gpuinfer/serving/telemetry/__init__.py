"""What a server reports to an OpenTelemetry collector: spans of requests, metrics, and its log, over OTLP."""
