// Perfetto's trace processor (the WebAssembly build that its UI runs) behind the HTTP interface of
// `trace_processor_shell -D --http-port N`, so that the perfetto Python package can use the real
// engine without a download.
//
// The UI's engine_bundle.js is a web worker's script: it is run as shipped with the globals that a
// worker has passed in as parameters, and called through a stand-in for its message port. Messages
// are TraceProcessorRpcStream (perfetto/trace_processor/trace_processor.proto), encoded by hand.
//
// usage: PERFETTO_UI_DIR=<folder of engine_bundle.js> node processor.mjs --http-port N [flags]
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';

const UI = process.env.PERFETTO_UI_DIR;
const PORT = Number(process.argv[process.argv.indexOf('--http-port') + 1]);

// path → [method, field of the method's arguments, field of its result]
const CALLS = {
  '/parse': [1, 101, 201],
  '/notify_eof': [2, 0, 212],
  '/query': [3, 103, 203],
  '/restore_initial_tables': [7, 0, 0],
  '/status': [10, 0, 210],
};

function varint(value) {
  const out = [];
  for (; value > 127; value = Math.floor(value / 128)) out.push((value % 128) + 128);
  return Buffer.from([...out, value]);
}

const number = (field, value) => Buffer.concat([varint(field * 8), varint(value)]);
const message = (field, bytes) => Buffer.concat([varint(field * 8 + 2), varint(bytes.length), bytes]);

/** Fields of a message, [number, value], as far as replies have them: varints and bytes. */
function* fieldsOf(bytes) {
  let at = 0;
  const read = () => {
    let value = 0;
    for (let unit = 1; ; unit *= 128) {
      const byte = bytes[at++];
      value += (byte % 128) * unit;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = read();
    if (tag % 8 === 0) yield [(tag - (tag % 8)) / 8, read()];
    else if (tag % 8 === 2) {
      const length = read();
      yield [(tag - 2) / 8, bytes.subarray(at, (at += length))];
    } else throw new Error(`wire type ${tag % 8} in a reply`);
  }
}

class Engine {
  constructor() {
    this.replies = [];
    this.port = {onmessage: null, postMessage: (data) => this.replies.push(data)};
    this.sequence = 0;
  }

  async start() {
    class FileRequest {  // the bundle fetches its wasm synchronously
      open(_, url) { this.file = path.join(UI, path.basename(String(url))); }
      send() { this.response = new Uint8Array(fs.readFileSync(this.file)).buffer; }
    }
    const worker = {location: {href: 'file:///'}, onmessage: null};
    const quiet = {log() {}, warn() {}, error() {}};
    const source = fs.readFileSync(path.join(UI, 'engine_bundle.js'), 'utf8');
    const names = ['self', 'WorkerGlobalScope', 'location', 'process', 'window', 'document', 'fetch',
      'XMLHttpRequest', 'console'];
    const none = undefined;
    new Function(...names, source)(worker, function () {}, worker.location, none, none, none, none,
      FileRequest, quiet);
    worker.onmessage({data: this.port});
    await new Promise((done) => setTimeout(done, 0));
  }

  /** Result of one call, the bytes of its message; several parts of a result are concatenated. */
  call([method, argumentsField, resultField], body) {
    const parts = [number(1, this.sequence++), number(2, method)];
    if (argumentsField) parts.push(message(argumentsField, body));
    this.replies.length = 0;
    this.port.onmessage({data: new Uint8Array(message(1, Buffer.concat(parts)))});
    const results = [];
    for (const reply of this.replies) {
      for (const [, rpc] of fieldsOf(reply)) {
        for (const [field, value] of fieldsOf(rpc)) {
          if (field === 5) throw new Error(Buffer.from(value).toString());
          if (field === resultField) results.push(Buffer.from(value));
        }
      }
    }
    return Buffer.concat(results);
  }
}

const engine = new Engine();
await engine.start();
// connections stay open between queries, even if a busy machine takes long
http.createServer({keepAliveTimeout: 0}, (request, response) => {
  const chunks = [];
  request.on('data', (chunk) => chunks.push(chunk));
  request.on('end', () => {
    const call = CALLS[request.url];
    let status = call ? 200 : 404;
    let body = Buffer.alloc(0);
    try {
      if (call) body = engine.call(call, Buffer.concat(chunks));
    } catch (error) {
      status = 500;
      body = Buffer.from(String(error.message));
    }
    response.writeHead(status, {'content-length': body.length});
    response.end(body);
  });
}).listen(PORT, '127.0.0.1');
