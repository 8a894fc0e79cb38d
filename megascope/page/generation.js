// A model that generates: prompt, tokens, strips, attention, logit lens, PCA, changes, run A next to B.
import { askFrames, askJson, askOne, saveParquet, savePng } from "./api.js";
import { changesCard } from "./changes.js";
import { atMostEvery, card, guarded, hideTip, link, linked, make, newestOnly, number, numbers, oncePerFrame, say, showTip, status, visible } from "./dom.js";
import { colourBar, drawHeat, pointable, range } from "./heat.js";

const NARROWEST = 5;  // pixels of a token in a strip
const SHADES_MS = 120;  // between two shadings: a thousand tokens change colour, too many for each token that a held key passes
const SHADE_STEPS = 12;  // steps of attention behind a token: fewer steps change fewer tokens
const TELLS_MS = 60;  // between two updates of words and bars of the chosen token: nobody reads faster
const GROWS_MS = 100;  // between two drawings of all strips while tokens come
const MOST_LABELS = 40;  // most tokens that are named next to a map
const FEW_HEADS = 4;  // most heads that are shown large
const MOST_IN_ALL_LAYERS = 32;  // most heads of a layer in the map of all layers
const LONGEST_IN_ALL_LAYERS = 256;  // most tokens in the map of all layers
const STRIPS = ["residual", "attention_out", "fc2", "neurons", "context", "query"];

/** One run: what was computed, token by token. */
class Run {
  constructor(places, changes) {
    Object.assign(this, { id: 0, places, changes, tokens: [], texts: [], steps: new Map(), strips: new Map(), prompt: 0 });
  }

  add(frame) {
    this.id = frame.run;
    if (!this.steps.size) this.prompt = frame.tokens.length;
    else this.tokens.length = this.texts.length = frame.start;
    this.tokens.push(...frame.tokens, frame.next);
    this.texts.push(...frame.texts, frame.text);
    const at = frame.start + frame.tokens.length;
    this.steps.set(at, { at, logprob: frame.logprob, top: frame.top, token: frame.next });
    for (const place of this.places.filter(one => frame.arrays[one])) {
      const { shape, data } = frame.arrays[place];
      if (!this.strips.has(place)) this.strips.set(place, { layers: frame.layers[place], parts: [], tokens: 0, width: shape[2] });
      const strip = this.strips.get(place);
      strip.parts.push({ data, wide: shape[1] * shape[2], from: strip.tokens * shape[2] });
      strip.tokens += shape[1];
    }
  }

  /** The step that chose the token at a position; none for tokens of the prompt. */
  stepAt(position) { return this.steps.get(position); }

  /** Rows are layers, columns tokens times numbers. */
  values(place) {
    const strip = this.strips.get(place), { layers, width } = strip, columns = strip.tokens * width;
    if (strip.values?.length !== layers.length * columns) {
      strip.values = new Float32Array(layers.length * columns);
      for (const { data, wide, from } of strip.parts) {
        for (let row = 0; row < layers.length; row++) strip.values.set(data.subarray(row * wide, (row + 1) * wide), row * columns + from);
      }
    }
    return { values: strip.values, rows: layers.length, columns, width, layers };
  }
}

export function showGeneration(view, state) {
  document.getElementById("subject").textContent =
    `${state.model} · ${state.num_layers} layers × ${state.num_heads} heads × ${state.hidden_size} · TP${state.tp} PP${state.pp}`;
  const runs = { A: null, B: null };
  const chosen = { token: Number(linked("at", "0")), layer: Number(linked("layer", "1")), heads: numbers(linked("heads", "0")), side: "A", under: "top" };
  let abort = null;

  const ask = card("prompt", "Prompt", "Ctrl+Enter runs A; with changes below, run B and compare", "two-thirds");
  const text = make("textarea", { id: "text", value: linked("text", "The cat sat on the"), spellcheck: false });
  const field = (id, value, attributes = {}) => make("input", { type: "number", id, value, min: 0, ...attributes });
  const most = field("most", linked("most", "16"), { min: 1, max: 1024 }), temperature = field("temperature", "0", { step: 0.1 }), seed = field("seed", "0");
  const reduction = make("select", { id: "reduction" }, ["rms", "max", "mean", "zeros", "entropy", "pixels"].map(one => make("option", {}, one)));
  const places = state.places.map(name => {
    const chip = make("button", { className: "chip", type: "button", onclick: () => chip.setAttribute("aria-pressed", chip.getAttribute("aria-pressed") !== "true") }, name);
    chip.setAttribute("aria-pressed", STRIPS.slice(0, 4).includes(name));
    return chip;
  });
  const runA = make("button", { className: "main", id: "run", onclick: guarded(() => run("A")) }, "Run");
  const runB = make("button", { id: "runB", onclick: guarded(() => run("B")) }, "Run B with changes");
  const stop = make("button", { id: "stop", disabled: true, onclick: () => abort?.abort() }, "Stop");
  ask.body.append(text, make("div", { className: "row" }, make("label", {}, "tokens", most), make("label", {}, "temperature", temperature), make("label", {}, "seed", seed), make("label", {}, "strips of", reduction), runA, runB, stop),
    make("div", { className: "row chips" }, places));

  const changes = changesCard(state, { title: "Changes of run B", moments: "token", runToPatchFrom: () => runs.A?.id ?? null });
  const spoken = card("spoken", "Tokens", "underlined: generated; ← → choose; shaded: what the chosen one looks at, by the heads below", "two-thirds");
  const top = card("top", "What it would say", "probabilities of the token chosen", "third");
  const strips = card("strips", "Strips", "rows are layers, the first on top; columns tokens; ↑ ↓ choose the layer", "", [
    make("button", { id: "difference", className: "chip", onclick: toggleDifference }, "B − A"),
    make("button", { id: "png", onclick: guarded(() => savePng("megascope-strips", viewsOf(strips.body, ".strip", strip => strip.firstChild))) }, "PNG"),
    make("button", { id: "parquet", onclick: guarded(exportStrips) }, "Parquet"),
  ]);
  const attention = card("attention", "Attention", "rows look at columns; a click on the words below a map makes it large", "half");
  const layerField = field("layer", chosen.layer, { min: 1, max: state.num_layers });
  const headsField = make("input", { id: "heads", size: 12, value: chosen.heads.join(" ") });
  const maps = make("div", { className: "heads" }, make("p", { className: "empty" }, "run a prompt first"));
  attention.body.append(make("div", { className: "row" }, make("label", {}, "layer", layerField), make("label", {}, "heads", headsField),
    make("button", { id: "look", onclick: guarded(showAttention) }, "Look"),
    make("button", { id: "allHeads", onclick: () => { headsField.value = Array.from({ length: Math.min(16, state.num_heads) }, (_, i) => i).join(" "); guarded(showAttention)(); } }, "All heads"),
    make("button", { id: "allLayers", onclick: guarded(showAllLayers) }, "All layers"),
    make("button", { id: "attentionPng", onclick: guarded(() => savePng("megascope-attention", viewsOf(maps, "figure", figure => figure.lastChild))) }, "PNG")), maps);
  const lens = card("lens", "Logit lens", "what each layer would say next; bold is what came", "half");
  const pca = card("pca", "PCA of the stream", "all tokens and layers; colour is the layer", "half");
  const pcaCanvas = make("canvas", { id: "pcaCanvas", className: "smooth" });
  pca.body.append(make("p", { className: "empty" }, "run a prompt first"), pcaCanvas);
  view.replaceChildren(...[ask, top, spoken, changes, strips, attention, lens, pca].map(one => one.section));
  changes.section.className = "";
  const current = () => runs[chosen.side] ?? runs.A;

  async function run(side) {
    abort?.abort();
    abort = new AbortController();
    link("text", text.value);
    link("most", most.value);
    const { ids } = await askJson("tokenize", { text: text.value });
    const command = {
      do: "run", prompt: ids, max_tokens: Number(most.value), temperature: Number(temperature.value), seed: Number(seed.value),
      reduction: reduction.value, places: places.filter(chip => chip.getAttribute("aria-pressed") === "true").map(chip => chip.textContent),
      ...(side === "B" ? changes.read() : {}),
    };
    const made = new Run(command.places, command.interventions);
    const begun = performance.now();
    [runA.disabled, runB.disabled, stop.disabled] = [true, true, false];
    try {
      for await (const frame of askFrames(command, abort.signal)) {
        made.add(frame);
        runs[side] = made;
        chosen.side = side;
        chosen.token = made.tokens.length - 1;
        status(`${side}: ${made.steps.size} tokens, ${((performance.now() - begun) / made.steps.size).toFixed(0)} ms each`);
        drawSoon();
      }
    } finally {
      [runA.disabled, runB.disabled, stop.disabled] = [false, false, true];
    }
    if (side === "A") runs.B = null;
    showAll();
    await showAttention();
    await showLens();
    await showPca();
  }

  function showAll() {
    showTokens();
    showTop();
    showStrips();
  }
  const drawSoon = oncePerFrame(() => { showTokens(); growStrips(); });
  const growStrips = atMostEvery(GROWS_MS, showStrips);

  function choose(token, layer = chosen.layer, side = chosen.side) {
    const run = runs[side];
    if (!run) return;
    const turned = side !== chosen.side;
    Object.assign(chosen, {
      side, token: Math.max(0, Math.min(run.tokens.length - 1, token)), layer: Math.max(1, Math.min(state.num_layers, layer)),
    });
    link("at", chosen.token);
    link("layer", chosen.layer);
    layerField.value = chosen.layer;
    if (turned) showAll();
    else { markToken(); tellChosen(); }
    if (turned || maps.dataset.layer !== String(chosen.layer) || !isInMaps(chosen.token)) guarded(async () => { await showAttention(); if (turned) { await showLens(); await showPca(); } })();
  }

  const tellChosen = atMostEvery(TELLS_MS, () => { showTop(); tellHeads(); });

  const lists = { A: null, B: null };  // for each run: its list, the tokens in it, and how each is marked
  function showTokens() {
    for (const side of ["A", "B"]) {
      if (!runs[side]) lists[side] = null;
      else if (lists[side]?.run !== runs[side]) lists[side] = listOf(side);
      else addTokens(lists[side]);
    }
    const shown = [lists.A, lists.B].filter(Boolean).map(list => list.element);
    if (shown.length !== spoken.body.children.length || shown.some((element, at) => element !== spoken.body.children[at])) spoken.body.replaceChildren(...shown);
    markToken();
  }

  function listOf(side) {
    const run = runs[side], tokens = [], at = event => tokens.indexOf(event.target.closest(".token"));
    const element = make("div", {
      className: "tokens", id: `tokens${side}`, onpointerleave: hideTip,
      onclick: event => { if (at(event) >= 0) choose(at(event), chosen.layer, side); },
      onpointermove: event => {
        const step = run.stepAt(at(event));
        showTip(event, at(event) < 0 ? "" : `${at(event)}: id ${run.tokens[at(event)]}${step ? ` · ${(100 * Math.exp(step.logprob)).toFixed(1)} %` : " · prompt"}`);
      },
    }, make("span", { className: "lead" }, side));
    const list = { side, run, element, tokens, shades: new Map(), current: -1 };
    addTokens(list);
    return list;
  }

  /** Add the tokens to a list that its run has and the list does not show yet. */
  function addTokens({ side, run, element, tokens }) {
    const other = side === "B" ? runs.A : null, more = [];
    for (let at = tokens.length + more.length; at < run.texts.length; at++) {
      const differs = other && other.tokens[at] !== run.tokens[at];
      more.push(make("button", { className: `token${run.stepAt(at) ? " new" : ""}${differs ? " changed" : ""}` }, visible(run.texts[at])));
    }
    tokens.push(...more);
    element.append(...more);
  }

  /** Mark the chosen token, and shade other tokens by its attention to them; touch only what changes. */
  function markToken() {
    for (const list of [lists.A, lists.B].filter(Boolean)) {
      const isChosen = list.side === chosen.side, now = isChosen ? chosen.token : -1;
      if (now !== list.current) {
        list.tokens[list.current]?.removeAttribute("aria-current");
        list.tokens[now]?.setAttribute("aria-current", true);
        if (isChosen) reveal(list.element, list.tokens[now]);
      }
      list.current = now;
    }
    for (const mark of strips.body.querySelectorAll(".mark")) placeMark(mark);
    shadeTokens();
  }

  const shadeTokens = atMostEvery(SHADES_MS, () => {
    const looks = looksOf(chosen.token);
    for (const list of [lists.A, lists.B].filter(Boolean)) {
      const shades = new Map();
      if (list.side === chosen.side) looks?.forEach((share, at) => { const step = Math.round(SHADE_STEPS * share); if (step) shades.set(at, Math.round(70 * step / SHADE_STEPS)); });
      for (const at of list.shades.keys()) if (!shades.has(at) && list.tokens[at]) list.tokens[at].style.background = "";
      for (const [at, share] of shades) if (list.shades.get(at) !== share && list.tokens[at]) list.tokens[at].style.background = `color-mix(in srgb, var(--look) ${share}%, transparent)`;
      list.shades = shades;
    }
  });

  /** Scroll the token's own list until the token is visible; do not scroll the page. */
  function reveal(list, token) {
    if (!token) return;
    const [box, own] = [list.getBoundingClientRect(), token.getBoundingClientRect()];
    if (own.top < box.top) list.scrollTop -= box.top - own.top;
    else if (own.bottom > box.bottom) list.scrollTop += own.bottom - box.bottom;
  }

  /** Attention of a token (or the nearest token in the maps), summed over the heads shown; the largest is 1. */
  function looksOf(token) {
    if (!weights || weights.of !== current()?.id) return null;
    const { shape: [heads, rows, columns], data } = weights.arrays.weights, row = rowOf(token);
    const sums = Array.from({ length: columns }, (_, column) => {
      let sum = 0;
      for (let head = 0; head < heads; head++) sum += data[(head * rows + row) * columns + column];
      return sum;
    });
    const most = Math.max(...sums);
    return sums.map(sum => sum / most);
  }

  function placeMark(mark) {
    const wide = current()?.tokens.length - 1 || 1;
    mark.style.translate = `${100 * Math.min(chosen.token, wide - 1)}%`;  // in parts of its own width, so that nothing is laid out again
    mark.style.width = `${100 / wide}%`;
  }

  function showTop() {
    const run = current(), step = run?.stepAt(chosen.token) ?? run?.steps.get(run.prompt);
    if (!step) return;
    const most = Math.exp(step.top[0][1]);
    top.body.replaceChildren(make("p", { className: "empty" }, `position ${step.at}${chosen.token < run.prompt ? " (the first after the prompt)" : ""}, run ${chosen.side}`),
      make("div", { className: "bars", id: "bars" }, step.top.flatMap(([id, logprob, word]) => {
        const bar = make("i");
        bar.style.width = `${100 * Math.exp(logprob) / most}%`;
        return [make("span", { title: `id ${id}`, className: id === step.token ? "chosen" : "" }, visible(word)), bar, make("b", {}, `${(100 * Math.exp(logprob)).toFixed(2)} %`)];
      })));
  }

  let difference = false;
  function toggleDifference() {
    difference = !difference && Boolean(runs.A && runs.B);
    document.getElementById("difference").setAttribute("aria-pressed", difference);
    if (!runs.B) say("run B with changes first");
    showStrips();
  }

  function showStrips() {
    const run = current();
    if (!run) return;
    strips.body.replaceChildren(...run.places.filter(place => run.strips.has(place)).map(place => {
      const shown = run.values(place);
      let { values, columns } = shown, scale = "linear", words = `run ${chosen.side}`;
      if (difference && runs.A?.strips.has(place) && runs.B?.strips.has(place)) {
        const [a, b] = [runs.A.values(place), runs.B.values(place)];
        columns = Math.min(a.columns, b.columns);
        values = Float32Array.from({ length: a.rows * columns }, (_, i) => {
          const row = Math.floor(i / columns), column = i % columns;
          return b.values[row * b.columns + column] - a.values[row * a.columns + column];
        });
        [scale, words] = ["both", "B − A"];
      }
      const [low, high] = range(values), canvas = make("canvas", { className: "stripMap" });
      if (scale === "linear") scale = low > 0 && high / low > 50 ? "log" : low < 0 ? "both" : "linear";
      drawHeat(canvas, values, shown.rows, columns, { scale });
      canvas.style.height = `${Math.max(40, Math.min(220, shown.rows * 12))}px`;
      const mark = make("div", { className: "mark" });
      pointable(canvas, (row, column) => {
        const token = Math.floor(column / shown.width);
        return `${place} · ${shown.layers[row] ? `layer ${shown.layers[row]} · ` : ""}${visible(run.texts[token] ?? "")} (${token})\n${number(values[row * columns + column])}`;
      }, (row, column) => choose(Math.floor(column / shown.width), shown.layers[row] || chosen.layer));
      return make("div", { className: "strip" }, make("div", {}, make("span", {}, `${place} ${reduction.value}`), make("span", {}, ...scaleOf(scale, low, high), ` · ${words}`)), make("div", { className: "band" }, canvas, mark));
    }));
    if (run.tokens.length <= MOST_LABELS) strips.body.append(make("div", { className: "under" }, run.texts.slice(0, -1).map(text => make("span", { title: text }, visible(text)))));
    // Bands wider than the card scroll together; the browser moves finished bitmaps.
    strips.body.style.setProperty("--band", `${run.tokens.length * NARROWEST}px`);
    for (const mark of strips.body.querySelectorAll(".mark")) placeMark(mark);
  }

  /** The lowest and the highest number with the colours between them. */
  function scaleOf(scale, low, high) {
    const bar = make("i", { className: "scale" }, " to "), most = Math.max(Math.abs(low), Math.abs(high));
    bar.style.backgroundImage = colourBar(scale);
    return scale === "both" ? [number(-most), bar, number(most)] : [number(low), bar, `${number(high)}${scale === "log" ? " (log)" : ""}`];
  }

  /** For saving: the canvases in some elements, each with the words of a part of its element. */
  function viewsOf(parent, selector, partOf) {
    return Array.from(parent.querySelectorAll(selector), one => ({ canvas: one.querySelector("canvas"), title: Array.from(partOf(one).childNodes, node => node.textContent).join("    ") }));
  }

  async function exportStrips() {
    const run = current();
    if (!run) throw new Error("run a prompt first");
    const columns = { place: [], layer: [], token: [], number: [], value: [] };
    for (const place of run.strips.keys()) {
      const { values, rows, columns: wide, width, layers } = run.values(place);
      for (let i = 0; i < rows * wide; i++) {
        columns.place.push(place);
        columns.layer.push(layers[Math.floor(i / wide)]);
        columns.token.push(Math.floor((i % wide) / width));
        columns.number.push(i % width);
        columns.value.push(Number.isFinite(values[i]) ? values[i] : null);
      }
    }
    await saveParquet("megascope-strips", columns);
  }

  let weights = null;
  function showAttention() { return askAttention(); }
  const askAttention = newestOnly(async () => {
    const run = current();
    if (!run?.id) return;
    chosen.layer = Number(layerField.value);
    chosen.heads = numbers(headsField.value);
    link("heads", chosen.heads.join(" "));
    link("layer", chosen.layer);
    const rows = rowsToAsk(run.tokens.length, chosen.heads.length);
    weights = await askOne({ do: "attention", run: run.id, layer: chosen.layer, heads: chosen.heads, rows });
    Object.assign(weights, { of: run.id, first: rows[0] ?? 0 });
    maps.dataset.layer = chosen.layer;
    drawAttention();
    markToken();
  });

  /** Rows of maps to ask for: all, or, in a long run, as many around the chosen token as the server computes at once. */
  function rowsToAsk(tokens, heads) {
    if (heads * tokens * tokens <= state.most_weights) return [];
    const count = Math.max(1, Math.min(state.most_rows, Math.floor(state.most_weights / (heads * tokens))));
    const first = Math.max(0, Math.min(tokens - 1 - count, chosen.token - (count >> 1)));
    return Array.from({ length: Math.min(count, tokens - 1) }, (_, at) => first + at);
  }

  /** The row of the maps that shows a token, or the nearest row where none does. */
  const rowOf = token => Math.max(0, Math.min(weights.arrays.weights.shape[1] - 1, token - weights.first));
  const isInMaps = token => weights?.of !== current()?.id || rowOf(token) === token - weights.first || token >= current().tokens.length - 1;

  function drawAttention() {
    if (!weights) return;
    const { shape, data } = weights.arrays.weights, [count, rows, columns] = shape, run = current(), { first } = weights;
    maps.className = `heads${count === 1 ? " one" : count <= FEW_HEADS ? " few" : ""}`;
    maps.replaceChildren(...weights.heads.map((head, at) => {
      const values = data.subarray(at * rows * columns, (at + 1) * rows * columns), canvas = mapOf(values, rows, columns, first);
      pointable(canvas, (row, column) => `head ${head}: ${visible(run.texts[first + row] ?? "")} (${first + row}) looks at ${visible(run.texts[column] ?? "")} (${column})\n${number(values[row * columns + column])}`, row => choose(first + row));
      const isNamed = count <= FEW_HEADS && columns <= MOST_LABELS;
      return make("figure", {}, isNamed ? labelled(canvas, run, rows, columns) : canvas, make("figcaption", { onclick: () => showHead(head) }));
    }));
    tellHeads();
  }

  /** A map; the run's first token can only look at itself, so its row does not decide the colours. */
  function mapOf(values, rows, columns, first) {
    const canvas = make("canvas", { className: "head" });
    drawHeat(canvas, values, rows, columns, { low: 0, high: Math.min(1, range(first === 0 && rows > 1 ? values.subarray(columns) : values)[1]) });
    canvas.style.aspectRatio = `${columns} / ${rows}`;
    return canvas;
  }

  function showHead(head, layer = chosen.layer) {
    headsField.value = head;
    layerField.value = layer;
    return guarded(showAttention)();
  }

  /** Show small maps of all heads of all layers, to find those worth looking at. */
  async function showAllLayers() {
    const run = current();
    if (!run?.id) throw new Error("run a prompt first");
    if (run.tokens.length > LONGEST_IN_ALL_LAYERS) throw new Error(`all layers are shown of runs of up to ${LONGEST_IN_ALL_LAYERS} tokens; choose a layer`);
    const heads = Array.from({ length: Math.min(MOST_IN_ALL_LAYERS, state.num_heads) }, (_, at) => at), cell = (...words) => make("small", {}, ...words);
    maps.className = "heads layers";
    maps.dataset.layer = "";
    maps.style.setProperty("--heads", heads.length);
    maps.replaceChildren(cell(), ...heads.map(head => cell(head)));
    for (let layer = 1; layer <= state.num_layers && maps.className === "heads layers" && current() === run; layer++) {
      const { arrays } = await askOne({ do: "attention", run: run.id, layer, heads, rows: [] }), [, rows, columns] = arrays.weights.shape;
      if (maps.className !== "heads layers") return;
      maps.append(cell(layer), ...heads.map(head => {
        const values = arrays.weights.data.subarray(head * rows * columns, (head + 1) * rows * columns), canvas = mapOf(values, rows, columns, 0);
        pointable(canvas, () => `layer ${layer} head ${head}`, () => { chosen.layer = layer; showHead(head, layer); });
        return canvas;
      }));
    }
  }

  /** Write below each map which token the chosen token looks at most. */
  function tellHeads() {
    if (!weights || weights.of !== current()?.id) return;
    const { shape: [, rows, columns], data } = weights.arrays.weights, { texts } = current(), row = rowOf(chosen.token);
    maps.querySelectorAll("figcaption").forEach((words, at) => {
      const own = data.subarray((at * rows + row) * columns, (at * rows + row + 1) * columns);
      let best = 0;
      for (let column = 1; column < columns; column++) if (own[column] > own[best]) best = column;
      words.textContent = `head ${weights.heads[at]} · ${visible(texts[weights.first + row] ?? "")} → ${visible(texts[best] ?? "")} ${(100 * own[best]).toFixed(0)} %`;
    });
  }

  /** A map with its tokens next to it and below it. */
  function labelled(canvas, run, rows, columns) {
    const words = count => Array.from({ length: count }, (_, at) => make("span", { title: run.texts[at] }, visible(run.texts[at])));
    return make("div", { className: "labelled" }, make("div", { className: "rows" }, words(rows)), canvas, make("i"), make("div", { className: "columns" }, words(columns)));
  }

  async function showLens() {
    const run = current();
    const found = await askOne({ do: "lens", run: run.id }), { shape, data } = found.arrays.ids, scores = found.arrays.logprobs.data;
    const [layers, tokens, most] = shape;
    lens.body.replaceChildren(make("div", { className: "scroll" }, make("table", { id: "lensTable" },
      make("tr", {}, make("th", {}, "after"), ...Array.from({ length: tokens }, (_, at) => make("th", {}, visible(run.texts[found.first + at])))),
      ...Array.from({ length: layers }, (_, i) => layers - 1 - i).map(row => make("tr", {}, make("th", {}, `layer ${found.layers[row]}`), ...Array.from({ length: tokens }, (_, at) => {
        const start = (row * tokens + at) * most, share = Math.exp(scores[start]);
        const cell = make("td", {
          onclick: () => choose(found.first + at + 1, found.layers[row]), onpointerleave: hideTip,
          onpointermove: event => showTip(event, Array.from({ length: most }, (_, n) => `${(100 * Math.exp(scores[start + n])).toFixed(1).padStart(5)} % ${visible(found.texts[data[start + n]])}`).join("\n")),
        }, visible(found.texts[data[start]]));
        cell.style.background = `color-mix(in srgb, var(--accent) ${Math.round(60 * share)}%, transparent)`;
        if (data[start] === run.tokens[found.first + at + 1]) cell.className = "said";
        return cell;
      }))))));
  }

  async function showPca() {
    const run = current(), found = await askOne({ do: "pca", run: run.id }), { shape, data } = found.arrays.points;
    const [layers, tokens, axes] = shape, ratio = devicePixelRatio || 1;
    pca.body.firstChild.textContent = `shares of the variance: ${found.shares.map(share => `${(100 * share).toFixed(0)} %`).join(", ")}`;
    const width = pcaCanvas.clientWidth || 500, height = 320, g = pcaCanvas.getContext("2d");
    Object.assign(pcaCanvas, { width: width * ratio, height: height * ratio });
    pcaCanvas.style.height = `${height}px`;
    g.scale(ratio, ratio);
    const at = (point, axis) => axes > axis ? data[point * axes + axis] : 0, all = Array.from({ length: layers * tokens }, (_, i) => i);
    const [left, right] = range(all.map(i => at(i, 0))), [low, high] = range(all.map(i => at(i, 1)));
    const spot = i => [14 + (width - 28) * (at(i, 0) - left) / (right - left || 1), height - 14 - (height - 28) * (at(i, 1) - low) / (high - low || 1)];
    const colour = layer => `hsl(${220 + 140 * layer / Math.max(1, layers - 1)} 60% 55% / .75)`;
    pca.body.firstChild.append(...(layers > 1 ? [" · layer ", String(found.layers[0]), make("i", { className: "scale" }), String(found.layers[layers - 1])] : []));
    const bar = pca.body.querySelector(".scale");
    if (bar) bar.style.backgroundImage = `linear-gradient(to right, ${Array.from({ length: layers }, (_, layer) => colour(layer)).join(", ")})`;
    for (const i of all) {
      g.fillStyle = colour(Math.floor(i / tokens));
      g.beginPath();
      g.arc(...spot(i), 3, 0, 7);
      g.fill();
    }
    pcaCanvas.onpointerleave = hideTip;
    pcaCanvas.onpointermove = event => {
      const box = pcaCanvas.getBoundingClientRect();
      let near = -1, least = 14;
      for (const i of all) {
        const [x, y] = spot(i), far = Math.hypot(x - event.clientX + box.left, y - event.clientY + box.top);
        if (far < least) [near, least] = [i, far];
      }
      if (near >= 0) showTip(event, `layer ${found.layers[Math.floor(near / tokens)]} · ${visible(run.texts[found.first + near % tokens])} (${found.first + near % tokens})`);
      else hideTip();
    };
  }

  addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); if (!runA.disabled) runA.click(); return; }
    if (event.key === "Escape") { abort?.abort(); return; }
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move || !current()) return;
    event.preventDefault();
    choose(chosen.token + move[0], chosen.layer + move[1]);
  });
  if (linked("text", "")) runA.click();
}
