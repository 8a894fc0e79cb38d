// What the page asks: JSON or frames, always with the token.
//
// A frame: u32 size, u32 header size, JSON header, arrays, little-endian, each padded to 8 bytes.

const fragment = new URLSearchParams(location.hash.slice(1));
const given = fragment.get("token");
if (given) {
  sessionStorage.setItem("token", given);
  fragment.delete("token");
  history.replaceState(null, "", location.pathname + (fragment.size ? `#${fragment}` : ""));
}
const token = sessionStorage.getItem("token") ?? "";

const KINDS = { f4: [Float32Array, 4], i4: [Int32Array, 4], f2: [Uint16Array, 2] };

/** The number that the 16 bits of a half stand for; not all browsers have Float16Array. */
function half(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

let allHalves = null;
/** Halves as numbers, looked up in a table: maps have millions. */
function halves(data) {
  allHalves ??= Float32Array.from({ length: 1 << 16 }, (_, bits) => half(bits));
  const made = new Float32Array(data.length);
  for (let i = 0; i < data.length; i++) made[i] = allHalves[data[i]];
  return made;
}

function readFrame(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  const headerSize = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + headerSize)));
  let at = 8 + headerSize;
  const arrays = {};
  for (const { name, shape, type } of header.arrays) {
    const [Kind, width] = KINDS[type];
    const size = shape.reduce((a, b) => a * b, 1) * width;
    let data = new Kind(bytes.slice(at, at + size).buffer);
    if (type === "f2") data = halves(data);
    arrays[name] = { shape, data };
    at += size + (-size & 7);
  }
  return { ...header, arrays };
}

async function* framesOf(body) {
  const reader = body.getReader();
  let parts = [], held = 0, wanted = 8;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    parts.push(value);
    held += value.length;
    while (held >= wanted) {  // join once a frame, however many parts it came in
      let bytes = parts.length === 1 ? parts[0] : joined(parts, held);
      wanted = 4 + new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
      if (held >= wanted) {
        yield readFrame(bytes.subarray(0, wanted));
        bytes = bytes.slice(wanted);
        wanted = 8;
      }
      [parts, held] = [[bytes], bytes.length];
    }
  }
}

function joined(parts, size) {
  const made = new Uint8Array(size);
  let at = 0;
  for (const part of parts) { made.set(part, at); at += part.length; }
  return made;
}

async function post(name, body, signal) {
  const response = await fetch(`api/${name}`, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
  });
  if (!response.ok) {
    const said = await response.json().catch(() => ({}));
    throw new Error(said.error ?? `the server answered ${response.status}`);
  }
  return response;
}

export const askJson = async (name, body = {}) => (await post(name, body)).json();

export async function askFrame(name, body) {
  return readFrame(new Uint8Array(await (await post(name, body)).arrayBuffer()));
}

export async function* askFrames(body, signal) {
  for await (const frame of framesOf((await post("ask", body, signal)).body)) {
    if (frame.kind === "error") throw new Error(frame.text);
    yield frame;
  }
}

export async function askOne(body) {
  for await (const frame of askFrames(body)) return frame;
  throw new Error("there was no answer");
}

export function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export async function saveParquet(name, columns) {
  save(`${name}.parquet`, await (await post("parquet", { columns })).blob());
}

const TITLE = 22, GAP = 10;  // pixels of a picture
/** Save views as one picture, one below the other, as large as shown: canvases, each below a line of words. */
export async function savePng(name, views) {
  if (!views.length) throw new Error("there is nothing to be seen yet");
  const sizes = views.map(({ canvas }) => [canvas.clientWidth || canvas.width, canvas.clientHeight || canvas.height]);
  const width = 2 * GAP + Math.max(...sizes.map(size => size[0])), height = GAP + sizes.reduce((sum, size) => sum + TITLE + size[1] + GAP, 0);
  const ratio = Math.min(devicePixelRatio || 1, 8192 / width, 16384 / height);
  const drawn = new OffscreenCanvas(width * ratio, height * ratio), g = drawn.getContext("2d"), style = getComputedStyle(document.documentElement);
  g.scale(ratio, ratio);
  g.fillStyle = style.getPropertyValue("--card");
  g.fillRect(0, 0, width, height);
  Object.assign(g, { fillStyle: style.getPropertyValue("--text"), font: "12px system-ui, sans-serif", imageSmoothingEnabled: false });
  let top = GAP;
  views.forEach(({ title, canvas }, at) => {
    g.fillText(title, GAP, top + 14);
    g.drawImage(canvas, GAP, top + TITLE, ...sizes[at]);
    top += TITLE + sizes[at][1] + GAP;
  });
  save(`${name}.png`, await drawn.convertToBlob());
}
