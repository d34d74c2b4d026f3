"""HTTP/1.1 at protocol level, without ASGI: a strict server (`server`, `parser`, `http_exchange`, `route_table`,
`access`) and a light client (`client`).
"""
