"""HTTP/1.1 at protocol level: a strict server, a light client, routes and who may use them. No ASGI."""
