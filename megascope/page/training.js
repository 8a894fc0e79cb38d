// A training's recordings: health by layer and iteration, one iteration in detail, parameters, requests.
import { askFrame, askJson, saveParquet, savePng } from "./api.js";
import { changesCard } from "./changes.js";
import { card, guarded, link, linked, make, newestOnly, number, oncePerFrame, status } from "./dom.js";
import { drawHeat, drawLines, pointable, range } from "./heat.js";

const REFRESH_MS = 2000;

export function showTraining(view, first) {
  let state = first, series = null, table = null, emphasise = () => {};
  const chosen = {
    key: linked("key", ""), layer: Number(linked("layer", "1")), iteration: Number(linked("iteration", "0")),
  };
  document.getElementById("subject").textContent = `training · ${first.folder}`;

  const summary = card("summary", "The run", "", "third");
  const choose = make("select", { id: "key", onchange: () => { chosen.key = choose.value; link("key", chosen.key); update(); } });
  const live = make("input", { type: "checkbox", id: "live", checked: true });
  const map = make("canvas", { id: "map", tabIndex: 0 }), lines = make("canvas", { id: "lines", className: "smooth" });
  map.style.height = "220px";
  const health = card("health", "By layer and iteration", "rows are layers, the first on top; red is not finite", "two-thirds", [
    make("button", { id: "png", onclick: guarded(() => savePng("megascope", [{ canvas: map, title: `${chosen.key}: ${legend.textContent}` }, { canvas: lines, title: "by layer" }])) }, "PNG"),
    make("button", { id: "parquet", onclick: guarded(exportSeries) }, "Parquet"),
  ]);
  const legend = make("div", { className: "empty" });
  health.body.append(make("div", { className: "row" }, choose, make("label", {}, live, "follow")), legend, map, lines);
  const detail = card("detail", "One iteration", "rows are layers, columns microbatches (and tokens)", "half");
  const cells = make("canvas", { id: "cells" }), cellWords = make("div", { className: "empty" }, "choose an iteration in the map");
  cells.style.height = "180px";
  detail.body.append(cellWords, cells);
  const weights = card("weights", "Parameters", "root mean squares, from samples; update over size is healthy near 0.001", "half");
  const asked = card("request", "Ask for more", "every rank heeds it from two iterations ahead", "");
  const changes = changesCard(first, { title: "Changes of what is computed", moments: "iteration", runToPatchFrom: () => null });
  const mayChange = make("p", { className: "empty", id: "mayChange" });
  changes.section.append(mayChange);
  view.replaceChildren(...[summary, health, detail, weights, changes, asked].map(one => one.section));
  asked.section.className = "two-thirds";
  asked.body.append(requestForm(first, changes, guarded(send)));

  pointable(map, (row, column) => series
    ? `layer ${series.layers[row]} · iteration ${series.iterations[column]}\n${number(series.at(row, column))}` : "",
  (row, column) => { if (series) select(series.layers[row], series.iterations[column]); });
  pointable(cells, (row, column) => table
    ? `layer ${table.layers[row]} · microbatch ${Math.floor(column / table.width)}${table.width > 1 ? ` · number ${column % table.width}` : ""}\n${number(table.values[row * table.columns + column])}` : "");
  map.addEventListener("keydown", event => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !series) return;
    event.preventDefault();
    const within = (list, value, step) => list[Math.max(0, Math.min(list.length - 1, Math.max(0, list.indexOf(value)) + step))];
    select(within(series.layers, chosen.layer, move[0]), within(series.iterations, chosen.iteration, move[1]));
  });

  const update = guarded(async () => {
    showSummary();
    listKeys();
    if (!choose.value) return;
    const [place, reduction, gradient] = choose.value.split("|");
    const frame = await askFrame("series", { place, reduction, gradient: gradient === "true" });
    const { data, shape } = frame.arrays.values;
    series = {
      iterations: frame.iterations, layers: frame.layers, place, reduction, gradient: gradient === "true",
      at: (row, column) => data[column * shape[1] + row],
    };
    drawSeries();
    await drawDetail();
    await drawWeights();
  });

  function listKeys() {
    const known = state.keys.map(key => key.join("|"));
    if (known.length === choose.options.length) return;
    choose.replaceChildren(...known.map(value => {
      const [place, reduction, gradient] = value.split("|");
      return make("option", { value }, `${place} ${reduction}${gradient === "true" ? " (gradient)" : ""}`);
    }));
    choose.value = known.includes(chosen.key) ? chosen.key : known.find(one => one.startsWith("residual|rms")) ?? known[0] ?? "";
  }

  function showSummary() {
    mayChange.textContent = state.may_change ? "they are asked for with Ask, and end with the next request without them"
      : "this job heeds none: it was started without --scope-interventions";
    const { layout, iterations, broken, verdict, problems } = state;
    const grid = ["tp", "pp", "dp", "cp", "ep"].filter(axis => layout[axis] > 1).map(axis => `${axis.toUpperCase()}${layout[axis]}`);
    const rows = [
      ["layout", grid.join(" × ") || "one rank"],
      ["iterations", iterations.length ? `${iterations[0]} to ${iterations.at(-1)} (${iterations.length} seen)` : "none yet"],
      ["first break", broken
        ? make("span", { className: "bad", id: "broken" }, `${broken.layer ? `layer ${broken.layer} ` : ""}${broken.place}${broken.gradient ? " (gradient)" : ""}, rank ${broken.rank} (${broken.label}), iteration ${broken.iteration}, microbatch ${broken.microbatch}`)
        : make("span", { className: "good" }, "all numbers finite")],
      ["bits", verdict.length ? make("span", { id: "bits", className: verdict.every(one => one.startsWith("all replicas agreed")) ? "good" : "bad" }, verdict.join("; ")) : "not probed"],
      ...(problems.length ? [["files", make("span", { className: "bad" }, problems.join("; "))]] : []),
    ];
    summary.body.replaceChildren(make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
  }

  function drawSeries() {
    const { layers, iterations } = series, values = new Float32Array(layers.length * iterations.length);
    for (let row = 0; row < layers.length; row++) for (let column = 0; column < iterations.length; column++) values[row * iterations.length + column] = series.at(row, column);
    const [low, high] = range(values), log = low > 0 && high / low > 30;
    drawHeat(map, values, layers.length, iterations.length, { scale: log ? "log" : "linear" });
    legend.textContent = `${number(low)} to ${number(high)}${log ? ", logarithmic" : ""} · medians over microbatches`;
    emphasise = drawLines(lines, iterations, layers.map((_, row) => iterations.map((_, column) => series.at(row, column))), { log });
    emphasise(layers.indexOf(chosen.layer));
  }

  const drawDetail = newestOnly(async () => {
    const iteration = series.iterations.includes(chosen.iteration) ? chosen.iteration : series.iterations.at(-1);
    const frame = await askFrame("table", { place: series.place, reduction: series.reduction, gradient: series.gradient, iteration });
    const { shape, data } = frame.arrays.values, columns = data.length / shape[0];
    table = { layers: frame.layers, values: data, columns, width: columns / shape[1] };
    const [low, high] = range(data);
    drawHeat(cells, data, shape[0], columns, { scale: low > 0 && high / low > 30 ? "log" : "linear" });
    cellWords.textContent = `iteration ${iteration}, ${series.place} ${series.reduction}: ${number(low)} to ${number(high)}`;
  });

  async function drawWeights() {
    const frame = await askFrame("weights", {}).catch(() => null);
    if (!frame) { weights.body.replaceChildren(make("p", { className: "empty" }, "none recorded yet: every eighth iteration has them")); return; }
    const { data } = frame.arrays.sizes;
    const rows = frame.names.map((name, at) => [name, data[3 * at], data[3 * at + 1], data[3 * at + 2], data[3 * at + 2] / data[3 * at]]);
    rows.sort((one, other) => (other[4] || 0) - (one[4] || 0));
    weights.body.replaceChildren(make("div", { className: "scroll" }, make("table", {},
      make("tr", {}, ...[`iteration ${frame.iteration}`, "size", "gradient", "update", "update / size"].map(text => make("th", {}, text))),
      ...rows.map(([name, ...values]) => make("tr", {}, make("th", {}, name), ...values.map(value => make("td", { className: "number" }, number(value))))))));
  }

  function select(layer, iteration) {
    Object.assign(chosen, { layer, iteration });
    link("layer", layer);
    link("iteration", iteration);
    markSoon();
    guarded(drawDetail)();
  }
  const markSoon = oncePerFrame(() => emphasise(series.layers.indexOf(chosen.layer)));

  async function exportSeries() {
    if (!series) return;
    const columns = { iteration: [], layer: [], value: [] };
    series.iterations.forEach((iteration, column) => series.layers.forEach((layer, row) => {
      columns.iteration.push(iteration);
      columns.layer.push(layer);
      columns.value.push(Number.isFinite(series.at(row, column)) ? series.at(row, column) : null);
    }));
    await saveParquet(`${series.place}-${series.reduction}`, columns);
  }

  async function send(request) {
    const { first: from } = await askJson("request", request);
    status(`asked: holds from iteration ${from}`);
  }

  async function follow() {
    if (live.checked && !document.hidden) {
      const before = state.iterations.at(-1);
      const now = await askJson("state").catch(() => null);
      if (now) {
        state = now;
        status(`iteration ${now.iterations.at(-1) ?? "–"}`);
        if (now.iterations.at(-1) !== before) await update();
      } else status("the server is gone");
    }
    setTimeout(follow, REFRESH_MS);
  }

  update();
  setTimeout(follow, REFRESH_MS);
}

function requestForm(state, changes, send) {
  const toggles = (names, on) => names.map(name => {
    const chip = make("button", { className: "chip", type: "button", onclick: () => chip.setAttribute("aria-pressed", chip.getAttribute("aria-pressed") !== "true") }, name);
    chip.setAttribute("aria-pressed", on.includes(name));
    return chip;
  });
  const places = toggles(state.places, ["residual", "attention_out", "fc2", "neurons", "loss"]);
  const reductions = toggles(state.reductions, ["rms", "max"]);
  const every = make("input", { type: "number", min: 1, value: 1, id: "every" });
  const boxes = Object.fromEntries([["per_token", "each token"], ["gradients", "gradients"]].map(([name, text]) => [name, [make("input", { type: "checkbox", id: name }), text]]));
  const pressed = chips => chips.filter(chip => chip.getAttribute("aria-pressed") === "true").map(chip => chip.textContent);
  return make("form", {
    onsubmit: event => {
      event.preventDefault();
      send({
        identifier: "page", places: pressed(places), reductions: pressed(reductions), every: Number(every.value),
        per_token: boxes.per_token[0].checked, gradients: boxes.gradients[0].checked, interventions: changes.list,
      });
    },
  },
  make("div", { className: "chips" }, places), make("div", { className: "row chips" }, reductions),
  make("div", { className: "row" }, make("label", {}, "every", every), ...Object.values(boxes).map(([box, text]) => make("label", {}, box, text)),
    make("button", { className: "main", id: "ask" }, "Ask")));
}
