// One iteration as lanes: the ranks at fault on top, below them those who wait; the critical path lies over them.

const LANE_HEIGHT = 30;
const BOLD_WIDTH = 7.6; // of a character of a lane's name
const PERFETTO = "https://ui.perfetto.dev";
const NARROW = 560; // below this width a lane's name stands above it

const laneName = (lane) => `rank ${lane.rank} · ${lane.place}`;

function criticalStrip(host, strip, meanings) {
  const box = element("div", { class: "plot" });
  whenSized(box, (width) => box.replaceChildren(drawn(width)));
  const used = new Set(strip.lanes.flatMap((lane) => lane.pieces.map((piece) => piece[0])));
  const keys = [...used].map((name) => key(`t-${name}`, `${name}: ${meanings.get(name) || name}`));
  if (strip.arrivals.length) keys.push(key("arrival", "a rank at fault arrives, the other stops waiting"));
  if (strip.path.length) keys.push(key("path", "the critical path: what determines when the iteration ends"));
  const part = strip.lanes.length < strip.num_ranks
    ? element("p", { class: "small" }, `${strip.lanes.length} of ${strip.num_ranks.toLocaleString("en")} ranks: ${strip.chosen_by}.`)
    : "";
  host.replaceChildren(box, element("p", { class: "key" }, ...keys), part, element("div", { class: "controls" }, opening(), saving()));

  function drawn(width) {
    const narrow = width < NARROW;
    const longest = Math.max(...strip.lanes.map((lane) => laneName(lane).length));
    const left = narrow ? 0 : longest * BOLD_WIDTH + 10;
    const high = narrow ? LANE_HEIGHT + 18 : LANE_HEIGHT + 6;
    const top = 4;
    const height = top + strip.lanes.length * high + 22;
    const scale = (width - left - 2) / strip.length_us;
    const picture = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Iteration ${strip.iteration}: what each of ${strip.lanes.length} ranks does` });
    const names = []; // drawn last: no line runs through them
    strip.lanes.forEach((lane, n) => {
      const y = top + n * high + (narrow ? 16 : 0);
      names.push(shape("text", { class: `axis lane-name${lane.role === "named" ? " culprit" : ""}`, x: narrow ? 2 : left - 8, y: narrow ? y - 4 : y + LANE_HEIGHT / 2 + 4, "text-anchor": narrow ? "start" : "end" }, laneName(lane)));
      picture.append(shape("rect", { class: `lane${lane.role === "named" ? " named" : ""}`, x: left, y, width: width - left, height: LANE_HEIGHT }));
      lane.pieces.forEach((piece, i) => picture.append(pieceShape(piece, left, y, scale, `${n} ${i}`)));
    });
    for (const [from, to, at] of strip.arrivals) {
      const x = left + at * scale;
      const ends = [from, to].map((n) => top + n * high + (narrow ? 16 : 0) + LANE_HEIGHT / 2);
      picture.append(shape("path", { class: "arrival", d: `M${x} ${ends[0]}V${ends[1]}` }), shape("circle", { class: "arrival", cx: x, cy: ends[1], r: 3 }));
    }
    const rim = ([lane]) => top + lane * high + (narrow ? 16 : 0) + LANE_HEIGHT;
    strip.path.forEach((line, n) => {
      const [x, length, y] = [left + line[1] * scale, Math.max(line[2] * scale, 0.6), rim(line)];
      const before = strip.path[n - 1];
      if (before && before[0] !== line[0]) picture.append(shape("path", { class: "path to", d: `M${x} ${rim(before)}V${y}` }));
      picture.append(shape("path", { class: "path on", d: `M${x} ${y}h${length}` }));
    });
    picture.append(...names, ...timeAxis(left, width, height - 6));
    listen(picture);
    return picture;
  }

  // Overlapped communication takes the lower third of the lane: compute goes on above it.
  function pieceShape([share, , start, length, overlapped], left, y, scale, place) {
    return shape("rect", {
      class: `piece t-${share}`, "data-piece": place, x: left + start * scale, width: Math.max(length * scale, 0.6),
      y: y + (overlapped ? 20 : 1), height: overlapped ? 9 : LANE_HEIGHT - 2,
    });
  }

  function timeAxis(left, width, y) {
    const ticks = ticksFor(0, strip.length_us / 1000).filter(([value]) => value * 1000 <= strip.length_us);
    const spare = ticks.length > width / 70 ? 2 : 1;
    return ticks.filter((_, i) => i % spare === 0).map(([value, digits], i) => shape("text", {
      class: "axis", x: left + (value * 1000 * (width - left - 2)) / strip.length_us, y, "text-anchor": !i ? "start" : value * 1000 > 0.97 * strip.length_us ? "end" : "middle",
    }, `${value.toFixed(digits)}${i ? "" : " ms"}`));
  }

  function listen(picture) {
    picture.addEventListener("pointermove", (event) => {
      if (!event.target.dataset.piece) return hint.hide();
      const [n, i] = event.target.dataset.piece.split(" ").map(Number);
      const [share, name, start, length] = strip.lanes[n].pieces[i];
      return hint.show(event.clientX, event.clientY, `rank ${strip.lanes[n].rank}: ${name || share}`, [
        [meanings.get(share) || share, withUnit(length / 1000, "ms"), `t-${share}`], ["from the iteration's begin", withUnit(start / 1000, "ms")]]);
    });
    picture.addEventListener("pointerleave", () => hint.hide());
  }

  // The lanes as a Chrome trace of their own, for Perfetto, without asking anybody for the trace.
  function trace() {
    return JSON.stringify(strip.lanes.flatMap((lane) => [
      { ph: "M", name: "process_name", pid: lane.rank, args: { name: `rank ${lane.rank} (${lane.place})` } },
      ...lane.pieces.map(([share, name, ts, dur, overlapped]) => ({
        ph: "X", pid: lane.rank, tid: overlapped ? 2 : share === "compute" ? 1 : 3, ts, dur, cat: share, name: `${name || share}${share === "wait" ? " (waiting)" : ""}`,
      })),
    ]));
  }

  // Perfetto's page answers PING once it listens; what it is then handed stays in the browser.
  function opening() {
    const link = element("a", { href: PERFETTO, class: "button" }, "open these lanes in Perfetto");
    link.addEventListener("click", (event) => {
      const page = window.open(PERFETTO);
      if (!page) return; // the browser refuses a second window: the link goes there by itself
      event.preventDefault();
      const asking = setInterval(() => (page.closed ? stop() : page.postMessage("PING", PERFETTO)), 100);
      const stop = () => [clearInterval(asking), removeEventListener("message", answered)];
      const answered = (message) => {
        if (message.source !== page || message.data !== "PONG") return;
        stop();
        page.postMessage({ perfetto: { buffer: new TextEncoder().encode(trace()).buffer, title: `iteration ${strip.iteration}` } }, PERFETTO);
      };
      addEventListener("message", answered);
    });
    return link;
  }

  function saving() {
    const link = element("a", { href: "#strip", download: `iteration-${strip.iteration}.json`, class: "button" }, "save them as a trace");
    link.addEventListener("click", () => {
      link.href = URL.createObjectURL(new Blob([trace()], { type: "application/json" }));
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    });
    return link;
  }
}
