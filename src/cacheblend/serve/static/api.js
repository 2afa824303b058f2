// What the page asks of its server, and what to tell people when that fails. Knows no element but the key's field.

import { byId } from "./dom.js";

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function send(path, body, signal) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...sent, headers: headers(), signal }).catch((error) => {
    if (signal?.aborted) throw error;
    throw new ServerError(`The server at ${location.host} cannot be reached. Is it running? Ask again when it is.`);
  });
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  throw new ServerError(found.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

async function json(path, body, signal) {
  const response = await send(path, body, signal);
  return response.json().catch((error) => {
    if (signal?.aborted) throw error;
    throw new ServerError("The server's answer broke off. Ask again.");
  });
}

export const library = () => json("/playground/passages");
export const shadow = () => json("/playground/shadow");

// Stores what is missing of a prompt, and says of each of its tokens where its KV came from.
export const explain = (prompt, signal) =>
  json("/playground/explain", { documents: prompt.documents, question: prompt.question, ...prompt.blending }, signal);

// One streamed answer. `onText` is called with the text so far.
export async function answer(mode, prompt, onText, signal) {
  const response = await send("/v1/chat/completions", {
    messages: [{ role: "user", content: prompt.question }],
    documents: prompt.documents,
    max_tokens: 48,
    temperature: 0,
    stream: true,
    cacheblend: mode === "blend" ? { mode, ...prompt.blending } : { mode },
  }, signal);
  let text = "";
  let report = null;
  try {
    for await (const event of events(response)) {
      if (event.error) throw new ServerError(event.error.message);
      text += event.choices?.[0]?.delta?.content ?? "";
      report = event.cacheblend ?? report;
      onText(text);
    }
  } catch (error) {
    if (error instanceof ServerError || signal?.aborted) throw error;
    report = null;
  }
  if (!report) throw new ServerError("The connection to the server ended in the middle of an answer. Ask again.");
  return { text: text.trim(), report };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
