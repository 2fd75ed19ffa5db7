// A chat with the models behind the gateway: what is asked, the answers with their figures, and the settings.

import {by, milliseconds, node, number, percent} from "./dom.js";
import {chat, models, Refused} from "./openai.js";
import * as pictures from "./pictures.js";
import {asCurl, asPython} from "./snippets.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
let messages = [];
let stopper = null;
let keyed = false;
let nameOf = address => address;

// `names` gives an endpoint's name for its address, where that is known.
export async function start(names) {
  nameOf = names;
  by("settings").open = matchMedia("(min-width: 52rem)").matches;
  by("ask").addEventListener("submit", event => { event.preventDefault(); send(); });
  by("message").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  by("stop").addEventListener("click", stop);
  by("retry").addEventListener("click", retry);
  by("clear").addEventListener("click", clear);
  by("as-curl").addEventListener("click", () => offer(asCurl));
  by("as-python").addEventListener("click", () => offer(asPython));
  by("copy").addEventListener("click", copy);
  by("close").addEventListener("click", () => by("snippet").close());
  by("key").addEventListener("change", listModels);
  pictures.start();
  await listModels();
}

export const stop = () => stopper?.abort();

async function listModels() {
  const note = by("no-model");
  try {
    const names = await models(by("key").value);
    by("model").replaceChildren(...names.map(name => new Option(name, name)));
    note.textContent = names.length ? "" : "No model is served yet. This page asks again when you press Send.";
  } catch (error) {
    if (error.status === 401) {
      keyed = true;
      by("key-label").hidden = false;
      by("settings").open = true;
      note.textContent = by("key").value ? "The gateway does not know this API key." : "This gateway asks for an API key: give one in the settings.";
    } else if (error.status === 403 || error.status === 404) {
      note.textContent = "No models are served at this address. Open /console/ of the gateway to chat.";
    } else {
      note.textContent = "The list of models cannot be read: " + error.message;
    }
  }
  note.hidden = !note.textContent;
}

function parsed(id, what, fits) {
  const text = by(id).value.trim();
  if (!text) return null;
  let value;
  try { value = JSON.parse(text); } catch (error) { throw new Error(`${what} is not JSON: ${error.message}`); }
  if (!fits(value)) throw new Error(`${what} must be ${id === "tools" ? "a list: [{\"type\": \"function\", …}]" : "an object: {\"type\": …}"}`);
  return value;
}

// The request for an answer to these messages.
function request(said) {
  const system = by("system").value.trim(), stops = by("stops").value.split("\n").filter(Boolean);
  const schema = parsed("schema", "The JSON schema", value => typeof value === "object" && value && !Array.isArray(value));
  const tools = parsed("tools", "Tools", Array.isArray);
  const body = {model: by("model").value, messages: system ? [{role: "system", content: system}, ...said] : said};
  for (const id of NUMBERS) {
    if (!by(id).validity.valid) throw new Error(`${id}: ${by(id).validationMessage}`);
    if (by(id).value !== "") body[id] = Number(by(id).value);
  }
  if (stops.length) body.stop = stops;
  if (schema) body.response_format = {type: "json_schema", json_schema: {name: "answer", schema, strict: true}};
  if (tools?.length) body.tools = tools;
  return {...body, stream: true, stream_options: {include_usage: true}};
}

async function send() {
  const text = by("message").value;
  if (stopper || !(text.trim() || pictures.any())) return;
  const said = await written(text);
  if (said && !stopper) await ask([...messages, said], () => {
    addTurn("You", ...pictures.take(), text);
    by("message").value = "";
  });
}

async function written(text) {
  try { return await pictures.message(text); } catch (error) { by("ask-trouble").textContent = error.message; }
}

function retry() {
  const last = messages.findLastIndex(one => one.role !== "assistant");
  if (stopper || last < 0) return;
  by("turns").lastElementChild.remove();
  ask(messages.slice(0, last + 1), () => {});
}

function clear() {
  stop();
  messages = [];
  by("turns").replaceChildren();
  by("ask-trouble").textContent = "";
  by("message").focus();
  ready();
}

function ready() {
  by("send").disabled = stopper !== null;
  by("stop").disabled = stopper === null;
  by("retry").disabled = stopper !== null || messages.length === 0;
  by("clear").disabled = messages.length === 0;
  by("turns").setAttribute("aria-busy", String(stopper !== null));
}

async function ask(said, accepted) {
  by("ask-trouble").textContent = "";
  let body;
  try {
    if (!by("model").value) await listModels();
    if (!by("model").value) throw new Error("There is no model to ask.");
    body = request(said);
  } catch (error) {
    by("ask-trouble").textContent = error.message;
    return;
  }
  accepted();
  messages = said;
  const own = stopper = new AbortController(), turn = answerTurn(body.model);
  ready();
  try {
    const answer = await chat(body, by("key").value, own.signal, answer => turn.show(answer));
    if (messages !== said) return;
    turn.end(answer);
    const calls = answer.stopped ? [] : answer.calls.filter(Boolean);
    const made = {role: "assistant", content: answer.content || null, ...calls.length ? {tool_calls: calls} : {}};
    if (answer.content || calls.length) messages = [...said, made];
    if (calls.length) turn.offerCalls(calls);
  } catch (error) {
    turn.fail(error instanceof Refused ? error.message : `The answer cannot be read: ${error.message}`);
  } finally {
    if (stopper === own) stopper = null;
    ready();
  }
}

function addTurn(who, ...content) {
  const said = content.map(one => typeof one === "string" ? node("div", one, "said") : one);
  const turn = node("li", [node("div", who, "who"), ...said]);
  by("turns").append(turn);
  turn.scrollIntoView({block: "nearest"});
  return turn;
}

function answerTurn(model) {
  const thought = node("div", "", "thought said"), thoughts = node("details", [node("summary", "Reasoning"), thought]);
  const content = node("div", "…", "said"), calls = node("div"), figures = node("div", "", "figures");
  thoughts.hidden = true;
  addTurn(model, thoughts, content, calls, figures);
  let drawing = 0;
  const show = answer => {
    drawing = 0;
    const follows = innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
    thoughts.hidden = !answer.reasoning;
    thoughts.open = Boolean(answer.reasoning && !answer.content);
    thought.textContent = answer.reasoning;
    content.textContent = answer.content;
    calls.replaceChildren(...answer.calls.filter(Boolean).map(callShown));
    if (follows) scrollTo(0, document.documentElement.scrollHeight);
  };
  return {
    // Tokens come faster than a screen can show them.
    show(answer) { drawing ||= requestAnimationFrame(() => show(answer)); },
    end(answer) { cancelAnimationFrame(drawing); show(answer); figures.replaceChildren(...figuresOf(answer)); },
    fail(why) { figures.replaceChildren(node("span", why, "trouble")); if (content.textContent === "…") content.textContent = ""; },
    offerCalls(asked) { calls.replaceChildren(callForm(asked)); },
  };
}

const callShown = call => node("div", [node("b", call.function.name), " ", node("code", call.function.arguments)], "call");

// The calls of an answer, each with a box for what the tool said.
function callForm(asked) {
  const boxes = asked.map(() => node("textarea"));
  const form = node("form", asked.map((call, at) => {
    const label = node("label", [`What ${call.function.name} answers`, boxes[at]]);
    const shown = callShown(call);
    shown.append(label);
    return shown;
  }));
  form.append(node("button", "Send the tools' answers"));
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (stopper) return;
    const answers = asked.map((call, at) => ({role: "tool", tool_call_id: call.id, content: boxes[at].value}));
    ask([...messages, ...answers], () => {
      asked.forEach((call, at) => addTurn(`${call.function.name} (tool)`, boxes[at].value));
      form.querySelectorAll("textarea, button").forEach(one => { one.disabled = true; });
    });
  });
  return form;
}

function figuresOf(answer) {
  const usage = answer.usage || {}, prompt = usage.prompt_tokens, out = usage.completion_tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? (answer.cached === null ? undefined : Number(answer.cached));
  const decoding = answer.last_s - answer.ttft_s, shown = [];
  const add = (name, value, className = "") => shown.push(node("span", [name + " ", node("b", value)], className));
  if (answer.ttft_s !== null) add("first token", milliseconds(answer.ttft_s));
  if (out > 1 && decoding > 0) add("tokens/s", number((out - 1) / decoding, 1));
  if (prompt !== undefined) add("prompt", number(prompt) + " tokens");
  if (prompt && cached !== undefined) add("cached", `${number(cached)} (${percent(cached / prompt)})`, cached ? "hit" : "");
  if (out !== undefined) add("answer", number(out) + " tokens");
  if (answer.replica) add("by", nameOf(answer.replica));
  if (answer.stopped) add("ended:", "you stopped it");
  else if (answer.finish === "length") add("ended:", "max_tokens or the context is reached");
  const link = node("a", "why this endpoint?");
  link.href = "#decisions=" + answer.id;
  shown.push(link);
  return shown;
}

async function offer(form) {
  const text = by("message").value.trim();
  by("ask-trouble").textContent = "";
  try {
    const asked = text || pictures.any() ? [...messages, await pictures.message(text)] : messages.slice(0, messages.findLastIndex(one => one.role !== "assistant") + 1);
    by("snippet-text").value = form(location.origin, request(asked.length ? asked : [{role: "user", content: "Hello"}]), keyed);
    by("copy").textContent = "Copy";
    by("snippet").showModal();
  } catch (error) {
    by("ask-trouble").textContent = error.message;
  }
}

async function copy() {
  by("snippet-text").select();
  try {
    await navigator.clipboard.writeText(by("snippet-text").value);
    by("copy").textContent = "Copied";
  } catch {
    by("copy").textContent = "Selected: copy it with your keyboard"; // not allowed where the page is not on https or loopback
  }
}
