"""``serve PORT``: answers every request with "hello". ``ask URL``: prints the answer."""

import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")


match sys.argv[1:]:
    case ["serve", port]:
        ThreadingHTTPServer(("", int(port)), Hello).serve_forever()
    case ["ask", url]:
        print(urllib.request.urlopen(url, timeout=5).read().decode())
    case _:
        sys.exit(__doc__)
