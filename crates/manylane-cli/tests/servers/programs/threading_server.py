import socketserver, sys


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        data, socket = self.request
        socket.sendto(data[::-1] + b"!", self.client_address)


class Server(socketserver.ThreadingUDPServer):
    daemon_threads = True


with Server((sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1", int(sys.argv[1])), Handler) as server:
    server.serve_forever()
