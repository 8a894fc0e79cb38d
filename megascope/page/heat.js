// Heat maps on canvases: one cell a pixel, scaled by CSS; the pointer says what is under it.
import { hideTip, showTip } from "./dom.js";

const LIGHT = [[247, 248, 250], [189, 212, 240], [94, 154, 214], [34, 88, 165], [12, 30, 84]];
const DARK = [[28, 29, 34], [38, 62, 110], [58, 117, 190], [122, 186, 240], [235, 246, 255]];
const BOTH = [[178, 24, 43], [244, 165, 130], [128, 128, 128], [146, 197, 222], [33, 102, 172]];
const NAN = [214, 40, 40];

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

const tables = new Map();
/** 256 colours as a canvas keeps them, then the colour of numbers that are not finite. */
function colours(stops) {
  if (tables.has(stops)) return tables.get(stops);
  const table = new Uint8ClampedArray(257 * 4).fill(255);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at));
    for (let c = 0; c < 3; c++) table[4 * i + c] = stops[low][c] + (at - low) * (stops[low + 1][c] - stops[low][c]);
  }
  table.set(NAN, 4 * 256);
  tables.set(stops, new Uint32Array(table.buffer));
  return tables.get(stops);
}

/** Smallest and largest finite value. */
export function range(values) {
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value < low && value !== -Infinity) low = value;
    if (value > high && value !== Infinity) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

/**
 * Draw `values` (rows × columns). `scale` is linear, log or both (around 0, for differences).
 * Numbers that are not finite are red.
 */
export function drawHeat(canvas, values, rows, columns, { scale = "linear", low, high } = {}) {
  const drawn = new OffscreenCanvas(Math.max(1, columns), Math.max(1, rows));
  const found = range(values);
  let [from, to] = [low ?? found[0], high ?? found[1]];
  const isLog = scale === "log", shown = value => Math.log(Math.max(value, 1e-12));
  if (scale === "both") { to = Math.max(Math.abs(from), Math.abs(to)); from = -to; }
  if (isLog) [from, to] = [shown(from), shown(to)];
  const table = colours(scale === "both" ? BOTH : isDark() ? DARK : LIGHT), slope = 255 / (to - from || 1);
  const image = new ImageData(drawn.width, drawn.height), pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < rows * columns; i++) {
    const value = values[i], at = Math.round(slope * ((isLog ? shown(value) : value) - from));
    pixels[i] = Number.isFinite(value) ? table[at < 0 ? 0 : at > 255 ? 255 : at] : table[256];
  }
  drawn.getContext("2d").putImageData(image, 0, 0);
  // Transfer a finished bitmap: a canvas that can be drawn on is copied for every frame of the page.
  Object.assign(canvas, { width: drawn.width, height: drawn.height });
  canvas.getContext("bitmaprenderer").transferFromImageBitmap(drawn.transferToImageBitmap());
}

/** The colours of a scale as a CSS picture, from the lowest to the highest. */
export function colourBar(scale) {
  const stops = scale === "both" ? BOTH : isDark() ? DARK : LIGHT;
  return `linear-gradient(to right, ${stops.map(stop => `rgb(${stop})`).join(", ")})`;
}

/** Show `words(row, column)` of the cell under the pointer as a tip; a click calls `choose(row, column)`. */
export function pointable(canvas, words, choose) {
  const cell = event => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / box.height * canvas.height);
    const column = Math.floor((event.clientX - box.left) / box.width * canvas.width);
    return [Math.max(0, Math.min(canvas.height - 1, row)), Math.max(0, Math.min(canvas.width - 1, column))];
  };
  canvas.addEventListener("pointermove", event => showTip(event, words(...cell(event))));
  canvas.addEventListener("pointerleave", hideTip);
  if (choose) canvas.addEventListener("click", event => choose(...cell(event)));
}

/**
 * Draw lines over a common x axis on a canvas, at the screen's resolution. Returns a function that
 * emphasises one line; the others are drawn only once.
 */
export function drawLines(canvas, xs, lines, { log = false } = {}) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 600, height = 180;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  g.scale(ratio, ratio);
  g.font = "11px system-ui";
  const shown = log ? value => Math.log10(Math.max(value, 1e-12)) : value => value;
  const [low, high] = range(lines.flatMap(values => Array.from(values, shown)));
  const [first, last] = range(xs), left = 58, bottom = height - 18;
  const x = value => left + (width - left - 8) * (value - first) / (last - first || 1);
  const y = value => bottom - (bottom - 8) * (shown(value) - low) / (high - low || 1);
  g.fillStyle = style.getPropertyValue("--soft");
  for (const share of [0, 0.5, 1]) {
    const value = low + share * (high - low), real = log ? 10 ** value : value;
    g.fillText(Math.abs(real) < 1e-3 || Math.abs(real) >= 1e5 ? real.toExponential(1) : real.toPrecision(3), 4, bottom - (bottom - 8) * share + 4);
  }
  g.fillText(first, left, height - 4);
  g.textAlign = "right";
  g.fillText(last, width - 8, height - 4);
  function draw(values, colour, lineWidth) {
    Object.assign(g, { strokeStyle: colour, lineWidth });
    g.beginPath();
    let pen = false;
    values.forEach((value, at) => {
      if (!Number.isFinite(value)) { pen = false; return; }
      g[pen ? "lineTo" : "moveTo"](x(xs[at]), y(value));
      pen = true;
    });
    g.stroke();
  }
  lines.forEach((values, at) => draw(values, `hsl(${(at * 47) % 360} 45% 55% / .6)`, 1));
  const plain = new OffscreenCanvas(canvas.width, canvas.height), accent = style.getPropertyValue("--accent");
  plain.getContext("2d").drawImage(canvas, 0, 0);
  return at => {
    g.clearRect(0, 0, width, height);
    g.drawImage(plain, 0, 0, width, height);
    if (lines[at]) draw(lines[at], accent, 2.4);
  };
}
