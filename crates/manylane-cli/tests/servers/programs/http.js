// Answers GET with a line, and POST with what was posted.
'use strict';
const http = require('http');

const [address, port] = process.argv.slice(2);

http
  .createServer((request, response) => {
    if (request.method === 'POST') {
      request.pipe(response);
    } else {
      response.end('hello\n');
    }
  })
  .listen(port, address);
