// What the picker says of itself, asked for each second and kept for some minutes. A picker that was restarted is
// recognised by its `run`; what was kept of the one before stays. One that refuses is asked again only when told to.

const KEPT_S = 600, KEPT_DECISIONS = 500, PREFIXES_EVERY = 5, EVERY_MS = 1000;
const REFUSALS = [401, 403, 404];

export const state = {
  now: 0, endpoints: {count: 0, shown: []}, decisions: [], count: 0, prefixes: [], textsAllowed: false,
  cells: [],         // [second, endpoint, requests, errors, prompt tokens, cached tokens, [times to first token]]
  speeds: new Map(), // second -> {endpoint: tokens/s}
};
let run = "", after = 0, since = 0, turn = 0, asking = false, refused = false, round = 0;

// Starts asking, and returns a function that asks at once. `wanted()` says what of it is wanted: {live, texts};
// `changed()` is called with what is new in the state, and `failed(message, refused)` with what is wrong, or "" when
// nothing is. What is `refused` is not asked for again before `again()`.
export function start(wanted, changed, failed) {
  const ask = async () => {
    if (asking || refused || document.hidden || !wanted().live) return;
    asking = true;
    const asked = round;
    try {
      const query = new URLSearchParams({after, since, texts: wanted().texts ? "1" : "0"});
      if (turn++ % PREFIXES_EVERY === 0) query.set("prefixes", "1");
      const answer = await fetch("/console/data?" + query);
      if (!answer.ok) {
        const {error} = await answer.json().catch(() => ({})); // a proxy in front may answer in any form
        refused = asked === round && REFUSALS.includes(answer.status);
        failed(error?.message ?? error ?? `the answer is ${answer.status}`, refused);
        return;
      }
      const found = await answer.json();
      failed("", false);
      if (asked === round) changed(take(found));
    } catch {
      failed("The picker does not answer.", false);
    } finally {
      asking = false;
    }
  };
  document.addEventListener("visibilitychange", ask);
  setInterval(ask, EVERY_MS);
  ask();
  return ask;
}

// Everything is asked for again: with prompts or without them, or after a refusal.
export function again() {
  round++;
  refused = false;
  after = turn = 0;
  state.decisions = [];
}

function take(found) {
  if (found.run !== run) {
    const restarted = run !== "" && after > 0;
    run = found.run;
    if (restarted) { after = turn = 0; return []; } // the next answer has all of its decisions
  }
  const second = Math.floor(found.now);
  state.now = found.now;
  state.endpoints = found.endpoints;
  state.textsAllowed = found.texts_allowed;
  state.count = found.decisions.count;
  state.decisions = [...found.decisions.shown, ...state.decisions].slice(0, KEPT_DECISIONS);
  after = found.decisions.count;
  if (found.series.length) since = found.series.at(-1)[0];
  state.cells = [...state.cells, ...found.series].filter(cell => cell[0] > second - KEPT_S);
  state.speeds.set(second, Object.fromEntries(found.endpoints.shown.map(one => [one.name, one.tokens_per_s ?? 0])));
  for (const old of state.speeds.keys()) if (old <= second - KEPT_S) state.speeds.delete(old);
  if (found.prefixes !== undefined) state.prefixes = found.prefixes;
  return found.decisions.shown;
}
