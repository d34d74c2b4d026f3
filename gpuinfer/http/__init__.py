"""HTTP/1.1 at protocol level, without ASGI: a strict server and a light client.

limits        what a server takes: sizes, times, numbers
strict        the head of a request → `Head`, by the letter; `diagnosis` says what is wrong with one
chunked       bodies in chunks
incoming      a stream of bytes → heads and bodies in turn; no I/O
connection    one connection of the server: reading, answering, ending
departures    who is gone, while nobody reads
exchange      one request and its response, as a handler has them
replies       the bytes of responses, and of errors in OpenAI's shape
paths         which handler answers what; `access`: keys, Host and Origin; `quotas`: what a key may ask in a minute
request_log   one line for each request
server        listening, deadlines, draining; `binding` makes the sockets, `tls` reads certificates
client        requests over kept connections; `line` is one of them
loop          uvloop, where it is installed
"""
