// The page: its views, its keys, and what it shows of the picker as that changes.

import {draw} from "./charts.js";
import {by} from "./dom.js";
import * as playground from "./playground.js";
import * as views from "./views.js";
import * as watch from "./watch.js";

const VIEWS = ["playground", "load", "prefixes", "decisions"];
let hidden = false; // the picker shows us nothing that is private

function wantedId() {
  const id = location.hash.split("=").slice(1).join("=");
  try { return decodeURIComponent(id); } catch { return id; }
}

function view() {
  const named = location.hash.slice(1).split("=")[0];
  return VIEWS.includes(named) ? named : "playground";
}

function navigate() {
  const now = view();
  for (const name of VIEWS) by(name).hidden = name !== now || (hidden && name !== "playground");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === "#" + now) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  by("search-row").hidden = now === "playground" || hidden;
  by("private").hidden = now === "playground" || !hidden;
  if (wantedId()) by("search").value = "";
  show();
}

// Draws what the view needs. Decisions only when there are others, so that nobody's selection is lost.
function show(fresh = null) {
  const {state} = watch, sought = by("search").value.trim().toLowerCase(), now = view();
  if (now === "load") {
    draw(state, Number(by("range").value), by("each").checked);
    views.endpoints(state.endpoints, sought);
  }
  if (now === "prefixes") views.prefixes(state.prefixes, sought);
  if (now === "decisions" && (fresh === null || fresh.length)) {
    views.decisions(state.decisions, state.count, sought, wantedId());
  }
}

function changed(fresh) {
  by("texts").disabled = !watch.state.textsAllowed;
  by("texts-why").textContent = watch.state.textsAllowed ? "" : "(the picker runs without --show-prompts)";
  show(fresh);
}

function failed(message, refused) {
  const was = hidden;
  // A picker that was restarted without --show-prompts shows the rest.
  const withoutTexts = refused && by("texts").checked;
  hidden = refused && !withoutTexts;
  by("trouble").textContent = hidden ? "" : message;
  by("private-why").textContent = hidden ? message : "";
  if (withoutTexts) { by("texts").checked = false; watch.again(); }
  if (was !== hidden) navigate();
}

function press(event) {
  if (event.key === "Escape") playground.stop();
  const typing = event.target.closest("input, textarea, select, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const name = VIEWS[Number(event.key) - 1];
  if (name) location.hash = name;
  if (event.key === "/") {
    event.preventDefault();
    by(view() === "playground" ? "message" : "search").focus();
  }
}

const ask = watch.start(() => ({live: by("live").checked, texts: by("texts").checked}), changed, failed);
by("try-again").addEventListener("click", () => { watch.again(); ask(); });
addEventListener("hashchange", navigate);
addEventListener("keydown", press);
for (const id of ["range", "each"]) by(id).addEventListener("change", () => show());
by("live").addEventListener("change", ask);
by("texts").addEventListener("change", () => { watch.again(); show(); ask(); });
by("search").addEventListener("input", () => {
  if (wantedId()) history.replaceState(null, "", "#" + view());
  show();
});
navigate();
playground.start(address => watch.state.endpoints.shown.find(one => one.address === address)?.name ?? address);
