// Small line charts, drawn as SVG.

import {by, milliseconds, node, number, percent} from "./dom.js";

const POINTS = 60, HEIGHT = 140, LEFT = 56, TOP = 8, BOTTOM = 18, COLOURS = 8;
const CHARTS = [
  {id: "requests", title: "Requests a second (dashed: refused, failed or given up)", value: bin => bin.requests / bin.width_s,
    dashed: bin => bin.errors ? bin.errors / bin.width_s : null, told: value => number(value, 1)},
  {id: "hits", title: "Hit share of prompt tokens", value: bin => bin.prompt ? bin.cached / bin.prompt : null, told: percent, most: 1},
  {id: "ttft", title: "Time to first token, median (dashed: 90th percentile)", value: bin => quantile(bin.ttfts, 0.5),
    dashed: bin => quantile(bin.ttfts, 0.9), told: milliseconds},
  {id: "speed", title: "Tokens of answers a second", value: bin => bin.speeds ? bin.speed / bin.speeds : null, told: value => number(value, 1)},
];
let pointed = null;

function quantile(values, share) {
  if (!values.length) return null;
  const sorted = values.toSorted((one, other) => one - other);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

// Curves of the last `range_s` seconds: one for each endpoint, or one of all together. Returns {name: [bin, …]}.
export function bins(state, range_s, each) {
  const width_s = range_s / POINTS, end = Math.floor(state.now / width_s) * width_s, curves = {};
  const names = each ? state.endpoints.shown.map(one => one.name).slice(0, COLOURS) : [];
  for (const name of each ? names : ["all replicas"]) {
    curves[name] = Array.from({length: POINTS}, () => ({width_s, requests: 0, errors: 0, prompt: 0, cached: 0, ttfts: [], speed: 0, speeds: 0}));
  }
  const at = (second, name) => {
    const index = POINTS - Math.ceil((end - second) / width_s);
    return second < end && index >= 0 ? curves[each ? name : "all replicas"]?.[index] : undefined;
  };
  for (const [second, name, requests, errors, prompt, cached, ttfts] of state.cells) {
    const bin = at(second, name);
    if (!bin) continue;
    bin.requests += requests;
    bin.errors += errors;
    bin.prompt += prompt;
    bin.cached += cached;
    bin.ttfts.push(...ttfts);
  }
  for (const [second, speeds] of state.speeds) {
    const counted = new Set();
    for (const [name, speed] of Object.entries(speeds)) {
      const bin = at(second, name);
      if (!bin) continue;
      bin.speed += speed;
      if (!counted.has(bin)) bin.speeds++;
      counted.add(bin);
    }
  }
  return curves;
}

function svg(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

export function draw(state, range_s, each) {
  const curves = bins(state, range_s, each), names = Object.keys(curves);
  for (const chart of CHARTS) drawOne(chart, curves, names, range_s);
}

function figureOf(chart) {
  const found = by("chart-" + chart.id);
  if (found) return found;
  const drawn = svg("svg", {role: "img"});
  const made = node("figure", [node("figcaption"), drawn]);
  made.id = "chart-" + chart.id;
  drawn.addEventListener("pointermove", event => {
    const box = drawn.getBoundingClientRect(), along = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    pointed = Math.max(0, Math.min(POINTS - 1, Math.round(along * (POINTS - 1))));
  });
  drawn.addEventListener("pointerleave", () => { pointed = null; });
  by("charts").append(made);
  return made;
}

function drawOne(chart, curves, names, range_s) {
  const figure = figureOf(chart), drawn = figure.querySelector("svg"), at = pointed ?? POINTS - 1;
  const width = drawn.clientWidth || 600;
  const lines = names.flatMap((name, colour) => [
    {name, colour, values: curves[name].map(chart.value)},
    ...chart.dashed ? [{name, colour, values: curves[name].map(chart.dashed), dashed: true}] : [],
  ]);
  const most = chart.most ?? (Math.max(0, ...lines.flatMap(line => line.values)) * 1.1 || 1);
  const x = index => LEFT + index / (POINTS - 1) * (width - LEFT - 4);
  const y = value => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
  const shown = [0, ...lines.some(line => line.values.some(value => value !== null)) ? [most] : []].flatMap(value => [
    svg("line", {class: "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value)}),
    svg("text", {x: LEFT - 4, y: y(value) + 4, "text-anchor": "end"}, chart.told(value)),
  ]);
  shown.push(svg("text", {x: LEFT, y: HEIGHT - 4}, `${number(range_s / 60, 1)} min ago`));
  shown.push(svg("text", {x: width - 4, y: HEIGHT - 4, "text-anchor": "end"}, "now"));
  for (const line of lines) shown.push(...curve(line, x, y));
  if (pointed !== null) shown.push(svg("line", {class: "grid", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM}));
  drawn.replaceChildren(...shown);
  const latest = values => values[at] ?? (pointed === null ? values.findLast(value => value !== null) : null) ?? null;
  const told = names.map((name, colour) => node("span", [
    node("span", name, `key c${colour}`), " ",
    lines.filter(line => line.name === name && (!line.dashed || line.values.some(value => value !== null))).map(line => chart.told(latest(line.values))).join(" / "),
  ].flat()));
  figure.querySelector("figcaption").replaceChildren(node("strong", chart.title), ...told);
  drawn.setAttribute("aria-label", `${chart.title}: ${told.map(one => one.textContent).join(", ")}`);
}

// The parts of a curve where there are values; a value alone is a dot.
function curve(line, x, y) {
  const parts = [], className = `c${line.colour}${line.dashed ? " dashed" : ""}`;
  let part = [];
  const close = () => {
    if (part.length === 1) parts.push(svg("circle", {class: `dot ${className}`, cx: part[0][0], cy: part[0][1], r: 2.5}));
    if (part.length > 1) parts.push(svg("polyline", {class: `curve ${className}`, points: part.map(point => point.join(",")).join(" ")}));
    part = [];
  };
  line.values.forEach((value, index) => { if (value === null) close(); else part.push([x(index), y(value)]); });
  close();
  return parts;
}
