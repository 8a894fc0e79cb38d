// Show the view that the server has: a training's recordings, or a model that generates.
import { askJson } from "./api.js";
import { guarded } from "./dom.js";
import { showGeneration } from "./generation.js";
import { showTraining } from "./training.js";

await guarded(async () => {
  const state = await askJson("state");
  const view = document.getElementById("view");
  if (state.mode === "training") showTraining(view, state);
  else showGeneration(view, state);
})();
