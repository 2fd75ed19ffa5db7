// How values become elements. What clients, models and engines say only ever becomes text.

export const by = id => document.getElementById(id);

export function node(tag, content = "", className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...[content].flat());
  return made;
}

export const number = (value, digits = 0) => value === null || value === undefined ? "–" :
  value.toLocaleString("en", {maximumFractionDigits: digits});
export const milliseconds = seconds => seconds === null || seconds === undefined ? "–" :
  number(seconds * 1000, seconds < 0.1 ? 1 : 0) + " ms";
export const bytes = value => value < 1000 ? value + " B" : number(value / 1000, 1) + " kB";
export const percent = share => share === null || share === undefined ? "–" : number(100 * share) + " %";

export function share(value) {
  if (value === null || value === undefined) return node("td", "–");
  const shown = document.createElement("meter");
  shown.value = value;
  shown.setAttribute("aria-hidden", "true");
  return node("td", [shown, percent(value)]);
}
