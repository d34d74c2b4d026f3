"""One replica: a model behind HTTP, in OpenAI's words and in our own.

asking       what a request's headers say: its id, class, deadline, client, trace
answers      errors as responses: status, OpenAI's shape, Retry-After; nothing internal
service      what all routes share: the session, who is under way, when nothing new is taken
chats        /v1/chat/completions and /v1/completions, whole or as server-sent events (`events`)
predict      /predict
generations  /v1/generations: our own form, for other processes of ours
evaluate     /v1/evaluate, for models of rows: JSON (`rows`), or tensors
health       alive, ready, busy, stuck
otel         spans for OpenTelemetry (`spans`: none)
figures      /stats
routes       all of them in one table, and from it the OpenAPI document (`openapi`)
replica      the life of it: listening, loading, ready, draining, closed
"""
