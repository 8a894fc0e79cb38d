// Puts the drawings into their places and keeps the ranks that somebody picked.

const MOST_PICKED = 4;
const FEW_RANKS = 16; // of so many, every rank is a line of its own

const { ranks, time } = figures;
const rowsOfRanks = range(0, ranks.names.length - 1);
const meanings = new Map([...ranks.share_names, ["transfer", "communicating, all members there"], ["wait", "waiting for others"], ["compute", "computing"], ["host", "loading data, collecting garbage, saving"]]);
const packed = { compute: unpacked(time.compute), relative: unpacked(time.relative) };
const numPoints = time.iterations.length;
const known = (value, scale) => (value ? value * scale : null);
const computeAt = (row, point) => known(packed.compute[row * numPoints + point], time.largest_ms / 65535);
const relativeAt = (row, point) => (point < 0 ? ranks.slowdown[row] : known(packed.relative[row * numPoints + point], 1 / time.ratio_step));

const namedRows = rowsOfRanks.filter((row) => ranks.causes[row]);
const slowest = () => rowsOfRanks.filter((row) => isNumber(ranks.slowdown[row])).sort((a, b) => ranks.slowdown[b] - ranks.slowdown[a]).slice(0, 1);
const alone = ranks.names.length === 1 ? [0] : [];
let picked = namedRows.length ? namedRows.slice(0, MOST_PICKED) : [...slowest(), ...alone].slice(0, 1);
const hasPeers = ranks.slowdown.some(isNumber);
// Stages do different work: in ms the band of many ranks would hide a rank that is slow for its stage.
let quantity = hasPeers && ranks.names.length > FEW_RANKS ? "relative" : "compute";

function drawOverTime() {
  const host = document.getElementById("compute-chart");
  const value = quantity === "compute" ? computeAt : relativeAt;
  const series = (row) => range(0, numPoints - 1).map((point) => value(row, point));
  const lines = picked.map((row, n) => ({ name: rankTitle(row), key: `own${n}`, values: series(row) }));
  const others = rowsOfRanks.filter((row) => !picked.includes(row));
  const columns = range(0, numPoints - 1).map((point) => others.map((row) => value(row, point)));
  const few = ranks.names.length <= FEW_RANKS;
  const faint = few ? others.map((row) => ({ name: rankTitle(row), values: series(row) })) : [];
  const band = others.length && !few ? {
    name: `the other ${others.length.toLocaleString("en")} ranks`,
    middle: columns.map(medianOf),
    low: columns.map((column) => quantileOf(column, 0.1)),
    high: columns.map((column) => quantileOf(column, 0.9)),
  } : null;
  const extra = (point) => {
    const order = rowsOfRanks.filter((row) => isNumber(value(row, point))).sort((a, b) => value(b, point) - value(a, point));
    const told = few ? order.filter((row) => !picked.includes(row)) : order.slice(0, 1);
    const unit = quantity === "compute" ? "ms" : "x";
    return told.map((row) => [few ? rankTitle(row) : `highest: ${rankTitle(row)}`, withUnit(value(row, point), unit)]);
  };
  lineChart(host, {
    title: quantity === "compute" ? "compute in an iteration, by rank" : `compute against peers, by rank${time.by_layers ? " (transformer layers)" : ""}`,
    unit: quantity === "compute" ? "ms" : "x", iterations: time.iterations, lines, band, faint, faintName: picked.length ? "every other rank" : "every rank", zoomed: quantity !== "compute", extra,
  });
}

function pick(row) {
  if (numPoints < 2) return; // one iteration is no course of time
  picked = picked.includes(row) ? picked.filter((one) => one !== row) : [...picked, row].slice(-MOST_PICKED);
  drawOverTime();
  document.getElementById("picked").textContent = picked.length ? `Drawn: ${picked.map(rankTitle).join(", ")}.` : "";
}

if (document.getElementById("topology")) topology(document.getElementById("topology"), relativeAt, pick);
figures.charts.forEach((chart, n) => {
  const host = document.getElementById(`chart-${n + 1}`);
  if (!chart || !host) return;
  lineChart(host, {
    title: chart.quantity, unit: chart.unit, iterations: chart.iterations, zoomed: chart.unit === "x",
    lines: chart.lines.map((line, i) => ({ ...line, key: `own${i}` })), band: chart.peers,
  });
});
if (figures.strip) criticalStrip(document.getElementById("strip-lanes"), figures.strip, meanings);
if (numPoints > 1) {
  lineChart(document.getElementById("step-chart"), {
    title: "iteration time, longest over the ranks", unit: "ms", iterations: time.iterations,
    lines: [{ name: "iteration", key: "own-step", values: time.iteration_ms }], band: null, zoomed: false,
  });
  if (hasPeers) {
    document.getElementById("quantity").append(choices("Quantity", [["compute", "in ms"], ["relative", "against peers"]], quantity, (value) => {
      quantity = value;
      drawOverTime();
    }));
  }
  drawOverTime();
}
rankTable(document.getElementById("rank-table"), pick);
