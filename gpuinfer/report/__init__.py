"""What a run has come to: the JSON report, and the verdict on what held it back."""
