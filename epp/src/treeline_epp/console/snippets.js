// A request as a command and as a program, to be pasted elsewhere. The key is never in them.

const quoted = text => "'" + text.replaceAll("'", "'\\''") + "'";

const MOST_ARGUMENT = 100_000; // Linux takes 128 KiB; with pictures a body is longer

export function asCurl(origin, body, keyed) {
  const json = JSON.stringify(body, null, 2), long = json.length > MOST_ARGUMENT;
  return [
    `curl ${origin}/v1/chat/completions -N -H 'content-type: application/json'`,
    ...keyed ? [`  -H "authorization: Bearer $TREELINE_API_KEY"`] : [],
    long ? `  -d @- <<'END'\n${json}\nEND` : `  -d ${quoted(json)}`,
  ].join(" \\\n") + "\n";
}

export function asPython(origin, body, keyed) {
  const {stream, stream_options, ...rest} = body;
  const named = Object.entries(rest).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`).join("");
  return `${keyed ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(origin + "/v1")}, api_key=${keyed ? 'os.environ["TREELINE_API_KEY"]' : '"none"'})
stream = client.chat.completions.create(
${named}    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function literal(value, depth = 0) {
  const inner = "\n" + "    ".repeat(depth + 1), outer = "\n" + "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  // A string of JSON is one of Python's, too.
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const items = list ? value.map(one => literal(one, depth + 1)) :
    Object.entries(value).map(([name, one]) => JSON.stringify(name) + ": " + literal(one, depth + 1));
  if (!items.length) return list ? "[]" : "{}";
  return (list ? "[" : "{") + inner + items.join("," + inner) + "," + outer + (list ? "]" : "}");
}
