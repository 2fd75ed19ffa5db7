// The gateway's OpenAI API, as far as the playground asks it.

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

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// Streams a chat. `show(answer)` is called as the answer grows; returns it when it is complete, or was stopped.
export async function chat(body, key, signal, show) {
  const began = performance.now();
  const answer = {id: requestId(), content: "", reasoning: "", calls: [], usage: null, replica: null,
    ttft_s: null, last_s: null, finish: null, stopped: false};
  const since = () => (performance.now() - began) / 1000;
  try {
    const response = await checked(await fetch("/v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(body),
      headers: {"content-type": "application/json", "x-request-id": answer.id, ...headersOf(key)},
    }));
    answer.replica = response.headers.get("x-treeline-endpoint");
    answer.cached = response.headers.get("x-treeline-cached-tokens");
    for await (const event of events(response.body)) {
      if (event.error) throw new Refused(500, event.error.message || "the answer broke off");
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
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.stopped = true;
  }
  return answer;
}

function take(answer, delta) {
  const thought = delta.reasoning_content || delta.reasoning || "";
  answer.content += delta.content || "";
  answer.reasoning += thought;
  for (const piece of delta.tool_calls || []) {
    const call = answer.calls[piece.index ?? 0] ??= {id: "", type: "function", function: {name: "", arguments: ""}};
    call.id = piece.id || call.id;
    call.function.name += piece.function?.name || "";
    call.function.arguments += piece.function?.arguments || "";
  }
  return Boolean(delta.content || thought || delta.tool_calls?.length);
}
