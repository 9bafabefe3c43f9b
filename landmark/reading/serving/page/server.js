// What the page asks of its server, with the key that this tab keeps.

const STORED = "landmark.key";

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED)),
};

export class WrongKey extends Error {}

// The response to a request. Throws an error whose message is the server's one line, WrongKey for 401. encodings: in
// which a file may be, that is not sure.
export async function request(path, { headers, ...options } = {}) {
  let response;
  try {
    headers = { ...headers, Authorization: `Bearer ${key.get()}` };
    response = await fetch(`v1/${path}`, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached, or ended the connection.");
  }
  if (response.ok) return response;
  const { message, encodings } = await response.json().then(({ error }) => error, () => ({ message: `the server answered ${response.status}` }));
  throw response.status === 401 ? new WrongKey(message) : Object.assign(new Error(message), { encodings });
}

export const json = async (path, options) => (await request(path, options)).json();

// The events of a stream: objects, and comments as texts. Throws the server's error, and where the stream breaks off.
export async function* events(response) {
  let rest = "";
  try {
    for await (const part of pieces(response.body.pipeThrough(new TextDecoderStream()).getReader())) {
      const found = (rest + part).split("\n\n");
      rest = found.pop();
      for (const each of found) {
        if (each === "data: [DONE]") return;
        if (each.startsWith(":")) yield each.slice(1).trim();
        if (!each.startsWith("data: ")) continue;
        const event = JSON.parse(each.slice(6));
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The connection to the server is lost.");
    throw error;
  }
  throw new Error("The server ended the connection too early.");
}

async function* pieces(reader) {
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {}); // of a stream that broke off
  }
}
