// Small helpers: elements, the tip, the trouble line, deep links.

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined));
  return made;
}

export function card(id, title, note, width, tools = []) {
  const body = make("div");
  const heading = make("h2", {}, title, make("small", {}, note), make("span", { className: "tools" }, tools));
  return { section: make("section", { id, className: width }, heading, body), body };
}

const tip = document.getElementById("tip");
export function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = !text;
  const left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6));
  tip.style.translate = `${left}px ${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 6)}px`;
}
export const hideTip = () => { tip.hidden = true; };

const trouble = document.getElementById("trouble");
export function say(error) {
  trouble.hidden = !error;
  trouble.textContent = error ? String(error.message ?? error) : "";
}
export const status = text => { document.getElementById("status").textContent = text; };

/** Run `work` and show why it fails, if it does. */
export const guarded = work => async (...given) => {
  try { say(null); return await work(...given); } catch (error) { if (error.name !== "AbortError") say(error); }
};

const links = new URLSearchParams(location.hash.slice(1));
export const linked = (name, otherwise) => links.get(name) ?? otherwise;
const LINK_MS = 100;  // browsers allow few changes of the address in a row
const writeLinks = atMostEvery(LINK_MS, () => history.replaceState(null, "", `${location.pathname}#${links}`));
export function link(name, value) {
  links.set(name, value);
  queueMicrotask(writeLinks);  // after all changes of this moment
}

/** Run `work` one call at a time; of the calls that come meanwhile only the newest is run. */
export function newestOnly(work) {
  let isAsking = false, waits = null;
  return async (...given) => {
    if (isAsking) { waits = given; return; }
    isAsking = true;
    try {
      for (waits = given; waits;) {
        const now = waits;
        waits = null;
        await work(...now);
      }
    } finally { isAsking = false; }
  };
}

/** Run `work` now, and after that at most once a pause; a call during a pause is run at its end. */
export function atMostEvery(pauseMs, work) {
  let waits = false, isDue = false;
  return function soon() {
    if (waits) { isDue = true; return; }
    [waits, isDue] = [true, false];
    work();
    setTimeout(() => { waits = false; if (isDue) soon(); }, pauseMs);
  };
}

/** Run `work` once before the next picture, however often it is called for. */
export function oncePerFrame(work) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; work(); });
  };
}

export const visible = text => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
export function number(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(+value.toPrecision(4));
}
export const numbers = text => text.split(/[\s,]+/).filter(Boolean).map(Number);
