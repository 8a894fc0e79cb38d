// Changes to what is computed, put together by hand: data that the server checks.
import { card, make, numbers, say } from "./dom.js";

const MEANINGS = {
  noise: "adds normal noise", scale_noise: "multiplies by 1 ± noise", scale: "multiplies", offset: "adds",
  zero: "sets to zero", replace: "takes the values of run A (patching)", flip: "flips bits of the weight",
};

/** The card of changes; `moments` names what its fields from and to count: tokens or iterations. */
export function changesCard(state, { title, moments, runToPatchFrom }) {
  const { section, body } = card("changes", title, "", "third");
  const list = [];
  const places = state.changeable;
  const options = names => names.map(name => make("option", {}, name));
  const kind = make("select", { id: "kind", onchange: explain }, options(state.kinds));
  const place = make("select", { id: "place" }, options(places));
  const field = (id, value) => make("input", { id, value, size: 7 });
  const [layers, units, tokens, amount, seed] = [field("layers", ""), field("units", ""), field("at", ""), field("amount", "1"), field("changeSeed", "0")];
  const [from, to] = [field("from", ""), field("to", "")];
  const meaning = make("div", { className: "empty" }), shown = make("div", { className: "chips", id: "changeList" });
  kind.value = "zero";
  place.value = places.includes("context") ? "context" : places[0];
  body.append(make("div", { className: "row" }, make("label", {}, "what", kind), make("label", {}, "where", place)),
    make("div", { className: "row" }, make("label", {}, "layers", layers), make("label", {}, "units", units), make("label", {}, "tokens", tokens)),
    make("div", { className: "row" }, make("label", {}, "amount", amount), make("label", {}, "seed", seed)),
    make("div", { className: "row" }, make("label", {}, `from ${moments}`, from), make("label", {}, "to", to), make("button", { id: "add", type: "button", onclick: add }, "Add")),
    meaning, shown);

  function explain() {
    const units = ["context", "query", "key", "value"].includes(place.value) ? "heads" : "features";
    meaning.textContent = `${MEANINGS[kind.value]}; units are ${units}; nothing given means all`;
  }
  place.addEventListener("change", explain);
  explain();

  function add() {
    const whole = value => numbers(value);
    list.push({
      kind: kind.value, place: place.value, layers: whole(layers.value), units: whole(units.value), tokens: whole(tokens.value),
      amount: Number(amount.value), seed: Number(seed.value),
      ...(from.value ? { first: Number(from.value) } : {}), ...(to.value ? { last: Number(to.value) } : {}),
    });
    say(null);
    show();
  }

  function show() {
    shown.replaceChildren(...list.map((one, at) => make("button", {
      className: "chip", type: "button", title: "take away", onclick: () => { list.splice(at, 1); show(); },
    }, `${one.kind} ${one.place}${one.layers.length ? ` layers ${one.layers}` : ""}${one.units.length ? ` units ${one.units}` : ""}${one.tokens.length ? ` tokens ${one.tokens}` : ""}${["zero", "replace"].includes(one.kind) ? "" : ` ${one.amount}`}${"first" in one || "last" in one ? ` (${one.first ?? ""}–${one.last ?? ""})` : ""} ×`)));
  }

  return {
    section,
    list,
    read() {
      if (!list.length) throw new Error("add a change first: what, where, then Add");
      const patches = list.some(one => one.kind === "replace");
      if (patches && runToPatchFrom() === null) throw new Error("run A first: patching takes its values");
      return { interventions: list, ...(patches ? { replace_from: runToPatchFrom() } : {}) };
    },
  };
}
