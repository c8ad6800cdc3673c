const server = require("dgram").createSocket("udp4");
server.on("message", (data, peer) => server.send(Buffer.concat([Buffer.from(data).reverse(), Buffer.from("!")]), peer.port, peer.address));
server.bind(Number(process.argv[2]), process.argv[3] || "127.0.0.1");
process.on("SIGTERM", () => process.exit(0));
