// The job as a picture: hosts and their GPUs, or stages and replicas. Colour is compute against the
// peers, in the whole window or at one point of it; slow connections are lines between cells.

const MAP_GAP = 2;
const LABEL_WIDTH = 6.7; // of a character of a label
const MOST_SINGLE_HOSTS = 12; // more hosts stand in several columns

const rankRows = new Map();
figures.ranks.names.forEach((name, row) => name.split("+").forEach((rank) => rankRows.set(Number(rank), row)));

const shadeOf = (value) =>
  (isNumber(value) ? `s${figures.edges.filter((edge) => value >= edge).length}` : "snone");

function rankTitle(row) {
  const name = figures.ranks.names[row];
  return `${name.includes("+") ? "ranks" : "rank"} ${name}`;
}

// `relative(row, point)` is compute over that of the peers, at -1 in the whole window.
function topology(host, relative, pick) {
  const { ranks, time, links } = figures;
  const number = ranks.names.length;
  const points = time.iterations.length;
  const hasHosts = ranks.hosts.some((name) => name);
  const wholeHosts = ranks.hosts.map((_, place) => {
    const rows = range(0, number - 1).filter((row) => ranks.host[row] === place);
    return rows.length > 1 && rows.length < number && rows.every((row) => ranks.causes[row]);
  });
  let kind = hasHosts ? "hosts" : "stages";
  let point = -1;
  let cells = [];
  let inside = []; // the ranks' numbers, where cells have room for them
  const box = element("div", { class: "plot map" });
  const redraw = whenSized(box, (width) => box.replaceChildren(drawn(width)));
  host.replaceChildren(controls(), box, legend());

  function controls() {
    const parts = [];
    if (hasHosts) {
      parts.push(choices("Arrangement", [["hosts", ranks.has_gpus ? "hosts × GPUs" : "hosts × ranks"], ["stages", "stages × replicas"]], kind, (value) => {
        kind = value;
        redraw();
      }));
    }
    if (points > 1) parts.push(slider());
    return element("div", { class: "controls" }, ...parts);
  }

  function slider() {
    const text = element("output", {}, "whole window");
    const bar = element("input", { type: "range", min: -1, max: points - 1, value: -1, "aria-label": "Iteration shown on the map" });
    bar.addEventListener("input", () => {
      point = Number(bar.value);
      text.textContent = point < 0 ? "whole window" : iterationsText(time.iterations[point]);
      cells.forEach((cell, row) => cell.setAttribute("class", cellClass(row)));
      inside.forEach((text, row) => text.setAttribute("class", insideClass(row)));
    });
    return element("label", { class: "slider" }, bar, text);
  }

  function cellClass(row) {
    return `cell ${shadeOf(relative(row, point))}${ranks.causes[row] ? " named" : ""}`;
  }

  const insideClass = (row) => `inside on-${shadeOf(relative(row, point))}`;

  function drawn(width) {
    const plan = kind === "hosts" ? hostPlan(width) : stagePlan(width);
    const picture = shape("svg", {
      viewBox: `0 0 ${width} ${plan.height}`, role: "img",
      "aria-label": `Every rank as a cell, coloured by its compute time over that of its peers`,
    });
    picture.append(...plan.labels.map(([x, y, text, anchor, full]) => {
      const label = shape("text", { class: "axis", x, y, "text-anchor": anchor }, text);
      if (full && full !== text) label.append(shape("title", {}, full));
      return label;
    }));
    picture.append(...plan.blocks.map(([x, y, w, h]) => shape("rect", { class: "block named", x, y, width: w, height: h, rx: 3 })));
    const size = plan.size - MAP_GAP;
    cells = plan.places.map(([x, y], row) => shape("rect", { class: cellClass(row), "data-row": row, x, y, width: size, height: size, rx: size > 14 ? 2 : 0 }));
    const named = cells.filter((_, row) => ranks.causes[row]);
    picture.append(...cells.filter((_, row) => !ranks.causes[row]), ...named);
    inside = [];
    if (size >= 24) {
      inside = plan.places.map(([x, y], row) => shape("text", {
        class: insideClass(row), x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle",
      }, ranks.names[row].length * LABEL_WIDTH < size ? ranks.names[row] : ""));
      picture.append(...inside);
    }
    picture.append(...linkShapes(plan, size));
    listen(picture);
    return picture;
  }

  // One line for each stage (and CP, TP rank), a column for each replica, folded at the width.
  function stagePlan(width) {
    const left = Math.min(0.35 * width, LABEL_WIDTH * Math.max(...ranks.line_names.map((name) => name.length)) + 10);
    const columns = Math.max(...ranks.column) + 1;
    const size = Math.min(40, Math.max(11, Math.floor((width - left) / columns)));
    const across = Math.min(columns, Math.floor((width - left) / size));
    const folds = Math.ceil(columns / across);
    const top = 18;
    const place = (line, column) => [left + (column % across) * size, top + (line * folds + Math.floor(column / across)) * size];
    const labels = ranks.line_names.map((name, line) => [left - 6, place(line, 0)[1] + size / 2 + 3, name, "end"]);
    const every = Math.max(1, Math.ceil(28 / size));
    for (let column = 0; column < across; column += every) labels.push([left + column * size + size / 2 - 1, 12, column ? String(column) : "DP 0", "middle"]);
    return {
      size, labels, blocks: [],
      places: ranks.line.map((line, row) => place(line, ranks.column[row])),
      height: top + ranks.line_names.length * folds * size + 4,
    };
  }

  // A block for each host: its name, then its GPUs side by side; many hosts in several columns.
  function hostPlan(width) {
    const members = ranks.hosts.map(() => []);
    ranks.host.forEach((place, row) => members[place].push(row));
    for (const rows of members) rows.sort((a, b) => ranks.gpu[a] - ranks.gpu[b] || a - b);
    const most = Math.max(...members.map((rows) => rows.length));
    const longest = Math.max(...ranks.hosts.map((name) => name.length));
    const left = Math.min(0.35 * width, LABEL_WIDTH * longest + 10);
    const letters = Math.floor((left - 10) / LABEL_WIDTH + 0.01);
    const few = ranks.hosts.length <= MOST_SINGLE_HOSTS;
    const usual = few ? 40 : number > 2048 ? 10 : 16;
    const size = Math.min(usual, Math.max(10, Math.floor((width - left) / most)));
    const across = Math.min(most, Math.floor((width - left) / size));
    const folds = Math.ceil(most / across);
    const blockWidth = left + across * size + 18;
    const columns = few ? 1 : Math.max(1, Math.floor((width + 18) / blockWidth));
    const perColumn = Math.ceil(ranks.hosts.length / columns);
    const blockHeight = folds * size + (few ? 4 : 2);
    const places = Array(number);
    const labels = [];
    const blocks = [];
    members.forEach((rows, place) => {
      const x = Math.floor(place / perColumn) * blockWidth;
      const y = 4 + (place % perColumn) * blockHeight;
      const name = ranks.hosts[place] || "no host";
      const shown = name.length > letters ? `${name.slice(0, Math.max(1, letters - 1))}…` : name;
      labels.push([x + left - 6, y + size / 2 + 3, shown, "end", name]);
      rows.forEach((row, i) => {
        places[row] = [x + left + (i % across) * size, y + Math.floor(i / across) * size];
      });
      if (wholeHosts[place]) blocks.push([x + left - 2, y - 2, Math.min(rows.length, across) * size + 2, folds * size + 2]);
    });
    return { size, labels, blocks, places, height: 4 + perColumn * blockHeight + 4 };
  }

  function linkShapes(plan, size) {
    const lower = inside.length ? 0.85 : 0.5; // below the numbers
    return links.flatMap((link) => {
      const ends = link.ranks.map((rank) => rankRows.get(rank)).filter((row) => row !== undefined);
      if (new Set(ends).size < 2) return [];
      const path = ends.map((row) => `${plan.places[row][0] + size / 2} ${plan.places[row][1] + size * lower}`).join("L");
      const lines = [shape("path", { class: link.named ? "link named" : "link", d: `M${path}` }), shape("path", { class: "reach", d: `M${path}` })];
      lines[1].addEventListener("pointermove", (event) => {
        event.stopPropagation();
        hint.show(event.clientX, event.clientY, `ranks ${link.ranks.slice(0, 8).join(", ")}${link.ranks.length > 8 ? ", …" : ""}`,
          [[link.kind, ""], ["transfer against equal ones", withUnit(link.ratio, "x")]]);
      });
      return lines;
    });
  }

  function listen(picture) {
    const rowOf = (event) => (event.target.dataset.row === undefined ? -1 : Number(event.target.dataset.row));
    picture.addEventListener("pointermove", (event) => {
      const row = rowOf(event);
      if (row < 0) return hint.hide();
      const when = point < 0 ? "whole window" : iterationsText(time.iterations[point]);
      const rows = [[ranks.places[row], ""], [`compute against peers, ${when}`, withUnit(relative(row, point), "x")]];
      if (ranks.hosts[ranks.host[row]]) rows.splice(1, 0, [`host ${ranks.hosts[ranks.host[row]]}${ranks.has_gpus ? `, GPU ${ranks.gpu[row]}` : ""}`, ""]);
      if (ranks.causes[row]) rows.push(["named for", ranks.causes[row]]);
      return hint.show(event.clientX, event.clientY, rankTitle(row), rows);
    });
    picture.addEventListener("pointerleave", () => hint.hide());
    picture.addEventListener("click", (event) => {
      if (rowOf(event) >= 0) pick(rowOf(event));
    });
  }

  function legend() {
    const { edges } = figures;
    const words = [`below ${edges[0].toFixed(2)}`, ...edges.slice(1).map((edge, i) => `${edges[i].toFixed(2)}–${edge.toFixed(2)}`), `${edges.at(-1).toFixed(2)} and more`];
    const keys = words.map((text, i) => key(`s${i}`, text));
    if (ranks.slowdown.some((value) => value === null)) keys.push(key("snone", "no peer"));
    if (Object.keys(ranks.causes).length) keys.push(key("named", "named by a finding"));
    if (links.length) keys.push(key("link", `connection ${figures.link_edge}× slower than equal ones, or more`));
    return element("p", { class: "key" }, ...keys);
  }
}
