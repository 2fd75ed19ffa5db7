// The pictures of the next message: chosen or pasted, shown small, sent as data URLs.

import {by, node} from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
let waiting = [];

export function start() {
  by("add-pictures").addEventListener("click", () => by("pictures").click());
  by("pictures").addEventListener("change", () => { add(by("pictures").files); by("pictures").value = ""; });
  by("message").addEventListener("paste", event => add(event.clipboardData.files));
}

function add(files) {
  waiting.push(...Array.from(files).filter(file => KINDS.includes(file.type)).map(file => ({file, shown: URL.createObjectURL(file)})));
  show();
}

function show() {
  by("attached").replaceChildren(...waiting.map(one => {
    const leave = node("button", [thumbnail(one), " ✕"]);
    leave.type = "button";
    leave.title = leave.ariaLabel = `Leave ${one.file.name || "this picture"} out`;
    leave.addEventListener("click", () => { waiting = waiting.filter(other => other !== one); show(); });
    return leave;
  }));
}

function thumbnail(one) {
  const image = node("img");
  image.src = one.shown;
  image.alt = one.file.name || "a pasted picture";
  return image;
}

const dataUrl = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name || "The picture"} cannot be read.`));
  reader.readAsDataURL(file);
});

// A user's message with the text and the pictures so far.
export async function message(text) {
  const urls = await Promise.all(waiting.map(one => dataUrl(one.file)));
  const parts = urls.map(url => ({type: "image_url", image_url: {url}}));
  return {role: "user", content: urls.length ? [...parts, ...text ? [{type: "text", text}] : []] : text};
}

export const any = () => waiting.length > 0;

// Empties the list, and returns what shows its pictures in the conversation.
export function take() {
  const shown = waiting.map(thumbnail);
  waiting = [];
  show();
  return shown.length ? [node("div", shown, "pictures")] : [];
}
