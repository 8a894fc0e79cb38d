"use strict";
// Elements, numbers and the hint: what every drawing of the page stands on.
// Texts of the trace are only ever set as text, never as HTML.

const figures = JSON.parse(document.getElementById("figures").textContent);
const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const element = (name, attributes = {}, ...children) =>
  filled(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, name), attributes, children);

// Numbers of 16 bits, little-endian, in base64; 0 stands for "not known".
function unpacked(text) {
  const bytes = atob(text);
  const values = new Uint16Array(bytes.length / 2);
  for (let i = 0; i < values.length; i += 1) {
    values[i] = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
  }
  return values;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// 0.01234 as "0.0123": three digits, but whole numbers of four and more.
function short(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(digits, 8) });
}

function withUnit(value, unit) {
  if (!isNumber(value)) return "–";
  if (unit === "x") return `${value.toFixed(value < 1.1 ? 3 : 2)}×`;
  return unit === "ms" && value >= 1000 ? `${short(value / 1000)} s` : `${short(value)} ${unit}`;
}

function medianOf(values) {
  const known = values.filter(isNumber).sort((a, b) => a - b);
  if (!known.length) return null;
  const half = known.length >> 1;
  return known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
}

function quantileOf(values, share) {
  const known = values.filter(isNumber).sort((a, b) => a - b);
  if (!known.length) return null;
  const place = share * (known.length - 1);
  const low = Math.floor(place);
  return known[low] + (known[Math.ceil(place)] - known[low]) * (place - low);
}

// One iteration, or the first and last of those that a point stands for.
const iterationsText = ([first, last]) =>
  first === last ? `iteration ${first}` : `iterations ${first} to ${last}`;

// What is shown next to the pointer: a title, then rows of [name, value, class of a key].
const hint = {
  box: element("div", { class: "hint", role: "status", hidden: "" }),
  show(x, y, title, rows) {
    const list = rows.map(([name, value, key]) =>
      element("div", {}, key ? element("i", { class: key }) : "", element("span", {}, name), element("b", {}, value)));
    this.box.replaceChildren(element("strong", {}, title), ...list);
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? Math.max(4, x - width - 14) : x + 14;
    const top = y + 14 + height > innerHeight ? Math.max(4, y - height - 14) : y + 14;
    this.box.style.left = `${left}px`;
    this.box.style.top = `${top}px`;
  },
  hide() {
    this.box.hidden = true;
  },
};
document.body.append(hint.box);
addEventListener("scroll", () => hint.hide(), { passive: true });

// Draw now and whenever the width of `host` changes.
function whenSized(host, draw) {
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(host.clientWidth);
    if (width > 0 && width !== drawn) {
      drawn = width;
      draw(width);
    }
  };
  new ResizeObserver(redraw).observe(host);
  redraw();
  return () => {
    drawn = 0;
    redraw();
  };
}

// Buttons of which one is pressed; `choose` is called with the value of the new one.
function choices(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) =>
    element("button", { type: "button", "aria-pressed": value === chosen ? "true" : "false" }, text));
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    buttons.forEach((other) => other.setAttribute("aria-pressed", other === button ? "true" : "false"));
    choose(options[i][0]);
  }));
  return element("span", { class: "choices", role: "group", "aria-label": label }, ...buttons);
}

const key = (name, text) => element("span", {}, element("i", { class: name }), text);
