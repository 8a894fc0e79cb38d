// Line charts over iterations. The axis begins at zero, or says where it begins.

const CHART_HEIGHT = 220;
const CHART_EDGES = { left: 52, right: 10, top: 12, bottom: 34 };
const MOST_BREAKS = 40;

// Ticks at 1, 2 or 5 times a power of ten that enclose the values.
function ticksFor(low, high) {
  const span = Math.max(high - low, 1e-9);
  const size = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 5, 10].map((each) => each * size).find((each) => each >= (span / 4) * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({ length: last - first + 1 }, (_, i) => [(first + i) * step, digits]);
}

// `spec`: {title, unit, iterations, lines: [{name, values, key}], band: {name, middle, low, high},
// faint: [{name, values}] with faintName, zoomed, extra(point) -> further rows of the hint}
function lineChart(host, spec) {
  let zoomed = Boolean(spec.zoomed);
  const faint = spec.faint || [];
  const all = [...spec.lines, ...faint].map((line) => line.values);
  if (spec.band) all.push(spec.band.low, spec.band.high, spec.band.middle);
  const known = all.flat().filter(isNumber);
  if (!known.length) return;
  if (spec.unit === "x") known.push(1); // what is usual stays in sight
  const box = element("div", { class: "plot" });
  const redraw = whenSized(box, (width) => box.replaceChildren(drawn(width)));
  const zoom = choices("Vertical axis", [[false, "from zero"], [true, "zoomed in"]], zoomed, (value) => {
    zoomed = value;
    redraw();
  });
  const unit = spec.unit === "x" ? "times the peers" : spec.unit;
  host.replaceChildren(
    element("figcaption", {}, element("span", {}, `${spec.title} (${unit})`), zoom), box, legend());

  function legend() {
    const keys = spec.lines.map((line) => key(line.key, line.name));
    if (faint.length) keys.push(key("faint", spec.faintName));
    if (spec.band && spec.band.middle.some(isNumber)) keys.push(key("peers", `median of ${spec.band.name}, shaded where they lie`));
    return element("p", { class: "key" }, ...keys);
  }

  function drawn(width) {
    const { left, right, top, bottom } = CHART_EDGES;
    const bounds = [Math.min(...known), Math.max(...known)];
    const ticks = zoomed ? ticksFor(...bounds) : ticksFor(0, Math.max(bounds[1], 1e-9));
    const [low, high] = [ticks[0][0], ticks.at(-1)[0]];
    const count = spec.iterations.length;
    const x = (i) => left + ((width - left - right) * (i + 0.5)) / count;
    const y = (value) => CHART_HEIGHT - bottom - ((value - low) / (high - low)) * (CHART_HEIGHT - bottom - top);
    const picture = shape("svg", {
      viewBox: `0 0 ${width} ${CHART_HEIGHT}`, role: "img", tabindex: "0", "aria-label": spoken(),
    });
    picture.append(...axes(width, ticks, x, y));
    if (low > 0) {
      picture.append(shape("text", { class: "mark", x: left + 4, y: CHART_HEIGHT - bottom - 5 },
        `axis begins at ${ticks[0][0].toFixed(ticks[0][1])}, not at 0`));
    }
    if (spec.band) picture.append(...bandShapes(x, y));
    for (const line of faint) picture.append(...lineShapes(line.values, "faint", x, y));
    for (const line of spec.lines) picture.append(...lineShapes(line.values, line.key, x, y));
    picture.append(...pointer(picture, width, x, y));
    return picture;
  }

  function axes(width, ticks, x, y) {
    const { left, right, top, bottom } = CHART_EDGES;
    const parts = ticks.flatMap(([value, digits]) => [
      shape("path", { class: "grid", d: `M${left} ${y(value)}H${width - right}` }),
      shape("text", { class: "axis", x: left - 6, y: y(value) + 4, "text-anchor": "end" },
        value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })),
    ]);
    const every = Math.max(1, Math.ceil(spec.iterations.length / Math.max(2, Math.floor(width / 90))));
    spec.iterations.forEach(([first], i) => {
      if (i % every === 0) {
        parts.push(shape("text", { class: "axis", x: x(i), y: CHART_HEIGHT - bottom + 15, "text-anchor": "middle" }, String(first)));
      }
    });
    const breaks = untraced();
    parts.push(...breaks.map((i) => shape("path", { class: "break", d: `M${(x(i) + x(i + 1)) / 2} ${top}V${CHART_HEIGHT - bottom}` })));
    parts.push(shape("text", { class: "axis", x: (left + width - right) / 2, y: CHART_HEIGHT - 4, "text-anchor": "middle" },
      breaks.length ? "iteration (dotted: some were not traced)" : "iteration"));
    return parts;
  }

  // Points after which more iterations were skipped than is usual; none where every gap is one.
  function untraced() {
    const gaps = spec.iterations.slice(1).map(([first], i) => first - spec.iterations[i][1]);
    const usual = medianOf(gaps);
    const places = gaps.flatMap((gap, i) => (gap > usual ? [i] : []));
    return places.length <= MOST_BREAKS ? places : [];
  }

  function bandShapes(x, y) {
    const { low, high, middle } = spec.band;
    const parts = [];
    for (const [from, to] of stretches(low)) {
      const there = range(from, to).map((i) => `${x(i)} ${y(high[i])}`);
      const back = range(from, to).reverse().map((i) => `${x(i)} ${y(low[i])}`);
      parts.push(shape("path", { class: "band", d: `M${[...there, ...back].join("L")}Z` }));
    }
    return [...parts, ...lineShapes(middle, "peers", x, y)];
  }

  function lineShapes(values, name, x, y) {
    return stretches(values).map(([from, to]) => (from === to
      ? shape("circle", { class: `dot ${name}`, cx: x(from), cy: y(values[from]), r: 2.5 })
      : shape("path", { class: `line ${name}`, d: `M${range(from, to).map((i) => `${x(i)} ${y(values[i])}`).join("L")}` })));
  }

  // A vertical line at the point under the pointer (or moved by the arrow keys), and its values.
  function pointer(picture, width, x, y) {
    const { left, right, top, bottom } = CHART_EDGES;
    const cursor = shape("path", { class: "cursor", d: "" });
    const dots = spec.lines.map((line) => shape("circle", { class: `dot ${line.key}`, r: 3.5, visibility: "hidden" }));
    let at = -1;
    const point = (i, clientX, clientY) => {
      at = Math.min(Math.max(i, 0), spec.iterations.length - 1);
      cursor.setAttribute("d", `M${x(at)} ${top}V${CHART_HEIGHT - bottom}`);
      dots.forEach((dot, n) => {
        const value = spec.lines[n].values[at];
        dot.setAttribute("visibility", isNumber(value) ? "visible" : "hidden");
        if (isNumber(value)) {
          dot.setAttribute("cx", x(at));
          dot.setAttribute("cy", y(value));
        }
      });
      hint.show(clientX, clientY, iterationsText(spec.iterations[at]), rowsAt(at));
    };
    const leave = () => {
      hint.hide();
      cursor.setAttribute("d", "");
      dots.forEach((dot) => dot.setAttribute("visibility", "hidden"));
    };
    picture.addEventListener("pointermove", (event) => {
      const share = (event.clientX - picture.getBoundingClientRect().left - left) / (width - left - right);
      point(Math.floor(share * spec.iterations.length), event.clientX, event.clientY);
    });
    picture.addEventListener("pointerleave", leave);
    picture.addEventListener("blur", leave);
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const { left: from, top: above } = picture.getBoundingClientRect();
      point(at + step, from + x(Math.max(at + step, 0)), above + top);
    });
    return [cursor, ...dots];
  }

  function rowsAt(i) {
    const rows = spec.lines.map((line) => [line.name, withUnit(line.values[i], spec.unit), line.key]);
    if (spec.band && isNumber(spec.band.middle[i])) {
      rows.push([`median of ${spec.band.name}`, withUnit(spec.band.middle[i], spec.unit), "peers"]);
      rows.push(["they lie from", withUnit(spec.band.low[i], spec.unit)]);
      rows.push(["to", withUnit(spec.band.high[i], spec.unit)]);
    }
    return spec.extra ? [...rows, ...spec.extra(i)] : rows;
  }

  function spoken() {
    const parts = spec.lines.map((line) => `${line.name} has a median of ${withUnit(medianOf(line.values), spec.unit)}`);
    if (spec.band && spec.band.middle.some(isNumber)) parts.push(`${spec.band.name} of ${withUnit(medianOf(spec.band.middle), spec.unit)}`);
    return `${spec.title}: ${parts.join(", ")}.`;
  }
}

const range = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);

// [first, last] of each run of known values.
function stretches(values) {
  const runs = [];
  values.forEach((value, i) => {
    if (!isNumber(value)) return;
    if (runs.length && runs.at(-1)[1] === i - 1) runs.at(-1)[1] = i;
    else runs.push([i, i]);
  });
  return runs;
}
