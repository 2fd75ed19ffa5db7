// Endpoints, prefixes and decisions as tables and a tree, each as far as the search finds something in it.

import {by, bytes, milliseconds, node, number, share} from "./dom.js";

const MOST_ROWS = 100;
const matches = (sought, ...values) => !sought || values.some(value => String(value ?? "").toLowerCase().includes(sought));
const told = (shown, count) => shown === count ? number(count) : `${number(shown)} of ${number(count)}`;

export function endpoints(found, sought) {
  const shown = found.shown.filter(one => matches(sought, one.name, one.address, one.pool, one.engine, one.state));
  by("endpoints").replaceChildren(...shown.map(endpointRow));
  by("endpoints-count").textContent = told(shown.length, found.count);
}

function endpointRow(one) {
  const up = one.selectable && !one.failing && !one.silent;
  const state = one.failing ? "answers errors alone" : one.silent ? "has fallen silent" : one.state;
  return node("tr", [node("td", one.name), node("td", one.pool), node("td", one.engine || "–"),
    node("td", state, up ? "state up" : "state"), node("td", number(one.in_flight), "number"),
    node("td", number(one.queued_requests), "number"), node("td", number(one.queued_tokens), "number"),
    node("td", number(one.prefill_tokens_per_s), "number"), share(one.memory_used),
    node("td", number(one.cached_tokens), "number"), node("td", one.subscription || one.no_events || "none")]);
}

const opened = new Set(); // decisions whose terms are shown, and
const folded = new Set(); // nodes of the tree whose children are not

export function decisions(found, count, sought, wantedId) {
  const shown = found.filter(one => wantedId ? one.request_id === wantedId :
    matches(sought, one.request_id, one.model, one.endpoint, one.policy, one.text));
  by("rows").replaceChildren(...shown.slice(0, MOST_ROWS).map(one => decisionRow(one, one.request_id === wantedId)));
  by("decisions-count").textContent = wantedId && !shown.length ?
    `none of request ${wantedId} yet: the last ${found.length} are kept` :
    `${told(Math.min(shown.length, MOST_ROWS), shown.length)} shown, ${number(count)} since the picker began`;
}

function decisionRow(one, wanted) {
  const names = Object.keys(one.terms), terms = node("table"), key = `${one.at} ${one.number}`;
  terms.append(node("tr", [node("th"), ...names.map(name => node("th", name, "number"))]));
  for (const term of names.length ? Object.keys(one.terms[names[0]]) : []) {
    terms.append(node("tr", [node("th", term), ...names.map(name => node("td",
      term.endsWith("_s") ? milliseconds(one.terms[name][term]) : number(one.terms[name][term]), "number"))]));
  }
  const why = node("details", [node("summary", one.policy + (one.fallbacks.length ? ", else " + one.fallbacks.join(", ") : "")), terms]);
  why.open = wanted || opened.has(key);
  why.addEventListener("toggle", () => { if (why.open) opened.add(key); else opened.delete(key); });
  const request = node("td", [one.request_id || "–", node("div", bytes(one.prompt_bytes) + " of prompt", "quiet")]);
  if (one.text !== undefined) request.append(node("code", one.text));
  return node("tr", [node("td", node("time", new Date(one.at * 1000).toLocaleTimeString())), node("td", one.endpoint),
    node("td", one.model || "–"), node("td", number(one.cached_tokens), "number"),
    node("td", number(one.uncached_tokens), "number"), node("td", milliseconds(one.predicted_ttft_s), "number"),
    node("td", why), request], wanted ? "sought" : "");
}

export function prefixes(groups, sought) {
  const shown = groups.map(group => prefixGroup(group, sought)).filter(Boolean);
  by("tree").replaceChildren(...shown.length ? shown : [node("p", groups.length ?
    "Nothing is found. Prompts are searched where they are shown." : "None yet: two requests must begin alike.", "quiet")]);
}

// An element that can be folded, and stays so when the tree is drawn again.
function foldable(key, summary, content) {
  const made = node("details", [node("summary", summary), content]);
  made.open = !folded.has(key);
  made.addEventListener("toggle", () => { if (made.open) folded.delete(key); else folded.add(key); });
  return made;
}

function prefixGroup(group, sought) {
  const name = (group.model || "any model") + (group.namespace ? ", namespace " + group.namespace : "");
  const inside = matches(sought, name) ? "" : sought;
  const items = group.prefixes.map((one, at) => prefixItem(one, `${name}/${at}`, inside)).filter(Boolean);
  return items.length ? foldable(name, `${name}: ${number(group.requests)} requests`, node("ul", items)) : null;
}

function prefixItem(one, key, sought) {
  const found = matches(sought, one.text, ...one.held_by.map(held => held.name));
  const children = one.children.map((child, at) => prefixItem(child, `${key}/${at}`, found ? "" : sought)).filter(Boolean);
  if (!found && !children.length) return null;
  const more = one.holders > one.held_by.length ? ` and ${one.holders - one.held_by.length} more` : "";
  const line = [node("b", number(one.requests)), " requests, ", bytes(one.bytes), ", ",
    node("span", one.holders === 0 ? "held by nobody" : "held by " + one.held_by.map(held =>
      held.name + (held.bytes < one.bytes ? " (" + bytes(held.bytes) + ")" : "")).join(", ") + more, "quiet")];
  if (one.text !== undefined) line.push(node("div", node("code", one.text)));
  return node("li", children.length ? foldable(key, line, node("ul", children)) : node("div", line));
}
