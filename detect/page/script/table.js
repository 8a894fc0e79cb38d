// The table of ranks: sorts by any column, filters, searches; shows a part and says how much is left.

const ROWS_AT_ONCE = innerWidth < 700 ? 10 : 25; // a row of a phone is a card
const MORE_ROWS = 200;
const byName = new Intl.Collator("en", { numeric: true }); // made once: each call of localeCompare makes one

function rankTable(host, pick) {
  const { ranks } = figures;
  const number = ranks.names.length;
  const shares = unpacked(ranks.shares);
  const width = ranks.share_names.length;
  const share = (row, n) => shares[row * width + n] / 10;
  const waiting = ranks.share_names.findIndex(([name]) => name === "wait");
  const hasHosts = ranks.hosts.some((name) => name);
  const hasPeers = ranks.slowdown.some(isNumber);
  const columns = [
    { name: "rank", value: (row) => ranks.first[row], text: (row) => ranks.names[row], first: 1, numeric: true },
    { name: "place", value: (row) => ranks.places[row], text: (row) => ranks.places[row], first: 1 },
    hasHosts && { name: "host", value: (row) => ranks.hosts[ranks.host[row]], text: (row) => `${ranks.hosts[ranks.host[row]]}${ranks.has_gpus ? `, GPU ${ranks.gpu[row]}` : ""}`, first: 1 },
    hasPeers && { name: "against peers", value: (row) => ranks.slowdown[row], text: (row) => withUnit(ranks.slowdown[row], "x"), first: -1, numeric: true },
    { name: "compute", value: (row) => ranks.compute_ms[row], text: (row) => withUnit(ranks.compute_ms[row], "ms"), first: -1, numeric: true },
    waiting >= 0 && { name: "waits", value: (row) => share(row, waiting), text: (row) => `${share(row, waiting).toFixed(1)} %`, first: 1, numeric: true },
    { name: "where its time goes", value: (row) => share(row, 0), text: bar, first: -1, wide: true },
    { name: "finding", value: (row) => ranks.causes[row] || "", text: (row) => ranks.causes[row] || "", first: -1 },
  ].filter(Boolean);
  const named = Object.keys(ranks.causes).length;
  // Who is named stands on top: by the slowdown of compute where that is what was found, else by the finding.
  const slowestIsNamed = slowest().some((row) => ranks.causes[row]);
  const first = named && !slowestIsNamed ? "finding" : hasPeers ? "against peers" : "rank";
  let order = { column: columns.find((one) => one.name === first), sign: first === "rank" ? 1 : -1 };
  let most = ROWS_AT_ONCE;

  const search = element("input", { type: "search", placeholder: "rank, place or host", "aria-label": "Search ranks" });
  const filter = element("select", { "aria-label": "Filter ranks" },
    element("option", { value: "all" }, number === 1 ? "all ranks" : `all ${number.toLocaleString("en")} ranks`),
    named ? element("option", { value: "named" }, `named by findings (${named})`) : null,
    hasPeers ? element("option", { value: "slow" }, "3 % slower than peers and more") : null,
    hasPeers ? element("option", { value: "fast" }, "3 % quicker than peers and more") : null,
    ...[...new Set(ranks.stage)].sort((a, b) => a - b).filter((_, __, all) => all.length > 1).map((stage) => element("option", { value: `stage ${stage}` }, `stage PP${stage}`)));
  const head = element("tr");
  const body = element("tbody");
  const status = element("p", { class: "status", role: "status" });
  const more = element("button", { type: "button" }, "show more");
  for (const column of columns) {
    const button = element("button", { type: "button" }, column.name);
    const cell = element("th", { scope: "col", class: column.numeric ? "number" : column.wide ? "wide" : null }, button);
    button.addEventListener("click", () => {
      order = { column, sign: order.column === column ? -order.sign : column.first };
      show();
    });
    column.cell = cell;
    head.append(cell);
  }
  const keys = ranks.share_names.map(([name, meaning]) => key(`t-${name}`, `${name}: ${meaning}`));
  host.replaceChildren(
    element("div", { class: "controls" }, search, filter),
    element("p", { class: "key" }, ...keys),
    element("table", { class: "ranks" }, element("thead", {}, head), body), status, more);
  search.addEventListener("input", restart);
  filter.addEventListener("change", restart);
  more.addEventListener("click", () => {
    most += MORE_ROWS;
    show();
  });
  show();

  function restart() {
    most = ROWS_AT_ONCE;
    show();
  }

  function kept() {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (row) => words.every((word) => (/^\d+$/.test(word)
      ? ranks.names[row].split("+").includes(word)
      : `rank ${ranks.names[row]} ${ranks.places[row]} ${ranks.hosts[ranks.host[row]]} ${ranks.causes[row] || ""}`.toLowerCase().includes(word)));
    const { value } = filter;
    const passes = {
      all: () => true,
      named: (row) => ranks.causes[row],
      slow: (row) => ranks.slowdown[row] >= 1.03,
      fast: (row) => isNumber(ranks.slowdown[row]) && ranks.slowdown[row] < 0.97,
    }[value] || ((row) => value === `stage ${ranks.stage[row]}`);
    return range(0, number - 1).filter((row) => passes(row) && matches(row));
  }

  // Rows without a value stand last, whichever way the column is sorted; equal rows by rank.
  function sorted(rows) {
    const { column: { value }, sign } = order;
    const missing = (one) => one === null || one === undefined || one === "";
    return rows.sort((a, b) => {
      const [one, other] = [value(a), value(b)];
      if (missing(one) || missing(other)) return missing(one) - missing(other) || ranks.first[a] - ranks.first[b];
      const difference = typeof one === "string" ? byName.compare(one, other) : one - other;
      return sign * difference || ranks.first[a] - ranks.first[b];
    });
  }

  function show() {
    const rows = sorted(kept());
    columns.forEach((column) => {
      if (order.column === column) column.cell.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
      else column.cell.removeAttribute("aria-sort");
    });
    body.replaceChildren(...rows.slice(0, most).map(line));
    const shown = Math.min(most, rows.length);
    status.textContent = rows.length ? `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} shown${document.getElementById("compute-chart") ? "; a click on a row draws the rank in the chart above" : ""}` : "no rank matches";
    more.hidden = shown >= rows.length;
  }

  function line(row) {
    const cells = columns.map((column, n) => {
      const content = column.text(row);
      const attributes = { class: `c${n}${column.numeric ? " number" : ""}${content === "" ? " empty" : ""}`, "data-name": column.name };
      return n ? element("td", attributes, content) : element("th", { ...attributes, scope: "row" }, content);
    });
    const whole = element("tr", { class: ranks.causes[row] ? "named" : null, tabindex: "0" }, ...cells);
    whole.addEventListener("click", () => pick(row));
    whole.addEventListener("keydown", (event) => {
      if (event.key === "Enter") pick(row);
    });
    return whole;
  }

  function bar(row) {
    const picture = shape("svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    let from = 0;
    ranks.share_names.forEach(([name], n) => {
      picture.append(shape("rect", { class: `t-${name}`, x: from, y: 0, width: share(row, n) * 10, height: 10 }));
      from += share(row, n) * 10;
    });
    picture.addEventListener("pointermove", (event) => hint.show(event.clientX, event.clientY, rankTitle(row),
      ranks.share_names.map(([name], n) => [name, `${share(row, n).toFixed(1)} %`, `t-${name}`])));
    picture.addEventListener("pointerleave", () => hint.hide());
    return picture;
  }
}
