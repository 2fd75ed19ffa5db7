// The gateway's OpenAI API, as far as the playground asks it.

const MOST_CALLS = 128;
const BROKEN = "The answer broke off before its end. Retry asks again.";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headersOf = key => key ? {authorization: "Bearer " + key} : {};

async function checked(answer) {
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text.slice(0, 500);
  try {
    const found = JSON.parse(text).error;
    message = typeof found === "string" ? found : found.message;
  } catch { /* no JSON: the text itself is all there is */ }
  throw new Refused(answer.status, message || "the gateway answered " + answer.status);
}

export async function models(key) {
  const answer = await checked(await fetch("/v1/models", {headers: headersOf(key)}));
  return (await answer.json()).data.map(one => one.id);
}

function requestId() {
  const drawn = crypto.getRandomValues(new Uint8Array(8));
  return "console-" + Array.from(drawn, byte => byte.toString(16).padStart(2, "0")).join("");
}

// What `fetch` and its readers throw when the gateway is away, or goes away; a stop by the user is passed on.
const lost = message => error => { throw error.name === "AbortError" ? error : new Refused(0, message); };

// The data of a stream's events, "[DONE]" included.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value = "\n", done} = await reader.read().catch(lost(BROKEN));
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.startsWith("data:") ? line.slice(5).trim() : "";
        if (data) yield data;
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // who stops reading ends the generation
  }
}

// Streams a chat. `show(answer)` is called as the answer grows; returns it when it is complete, or was stopped. A stream
// that ends without saying so has lost its end: it throws Refused.
export async function chat(body, key, signal, show) {
  const began = performance.now();
  const answer = {id: requestId(), content: "", reasoning: "", calls: [], usage: null, replica: null,
    ttft_s: null, last_s: null, finish: null, stopped: false};
  const since = () => (performance.now() - began) / 1000;
  try {
    const response = await checked(await fetch("/v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(body),
      headers: {"content-type": "application/json", "x-request-id": answer.id, ...headersOf(key)},
    }).catch(lost("The gateway does not answer.")));
    answer.replica = response.headers.get("x-treeline-endpoint");
    answer.cached = response.headers.get("x-treeline-cached-tokens");
    let done = false;
    for await (const data of events(response.body)) {
      done = data === "[DONE]";
      if (done) break;
      const event = parsed(data);
      if (event.error) throw new Refused(500, event.error.message ?? event.error);
      if (event.usage) answer.usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      if (take(answer, choice.delta || {})) {
        answer.ttft_s ??= since();
        answer.last_s = since();
      }
      answer.finish = choice.finish_reason || answer.finish;
      show(answer);
    }
    if (!done && !answer.finish) throw new Refused(0, BROKEN);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.stopped = true;
  }
  return answer;
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch { // cut within a line
    throw new Refused(0, BROKEN);
  }
}

function take(answer, delta) {
  const thought = delta.reasoning_content || delta.reasoning || "";
  answer.content += delta.content || "";
  answer.reasoning += thought;
  for (const piece of delta.tool_calls || []) {
    const at = piece.index ?? 0;
    if (!(Number.isInteger(at) && at >= 0 && at < MOST_CALLS)) throw new Refused(500, `The engine numbers a call of a tool ${at}, which is not 0 to ${MOST_CALLS - 1}.`);
    const call = answer.calls[at] ??= {id: "", type: "function", function: {name: "", arguments: ""}};
    call.id = piece.id || call.id;
    call.function.name += piece.function?.name || "";
    call.function.arguments += piece.function?.arguments || "";
  }
  return Boolean(delta.content || thought || delta.tool_calls?.length);
}
