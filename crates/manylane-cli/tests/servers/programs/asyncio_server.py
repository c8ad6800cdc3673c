import asyncio, sys


class Protocol(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, addr):
        self.transport.sendto(data[::-1] + b"!", addr)


async def main():
    loop = asyncio.get_running_loop()
    address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    await loop.create_datagram_endpoint(Protocol, local_addr=(address, int(sys.argv[1])))
    await asyncio.Event().wait()


asyncio.run(main())
