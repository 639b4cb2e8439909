// What the page asks for. The token came with the link, and stays in this tab.

const KEY = "polyrl-token";
const ROOT = new URL("/dash/api/", location.origin);

export function takeToken() {
  const given = /[#&]token=([^&]+)/.exec(location.hash);
  if (given) {
    sessionStorage.setItem(KEY, decodeURIComponent(given[1]));
    history.replaceState(null, "", location.pathname + "#/now");
  }
}

export const setToken = (token) => sessionStorage.setItem(KEY, token);
const headers = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` });

export class Unauthorized extends Error {}

async function checked(response) {
  if (response.status === 401 || response.status === 403) throw new Unauthorized("a valid token is needed");
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Error(told.error ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

export async function get(name, query = {}) {
  const url = new URL(name, ROOT);
  for (const [key, values] of Object.entries(query)) for (const value of [values].flat()) if (value !== "" && value !== null && value !== undefined) url.searchParams.append(key, value);
  return (await checked(await fetch(url, { headers: headers() }))).json();
}

const isSeen = async () => {
  while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
};

/** Call `tell` with every state of a run, as long as the page is open; dial again after a break. A hidden tab asks for nothing: browsers have six connections to a server, for all tabs together. */
export function watch(run, tell, lost) {
  let isOver = false, control = new AbortController();
  const hide = () => { if (document.hidden) control.abort(); };
  document.addEventListener("visibilitychange", hide);
  (async () => {
    while (!isOver) {
      await isSeen();
      if (isOver) return;
      control = new AbortController();
      try {
        const url = new URL("stream", ROOT);
        url.searchParams.set("run", run);
        const response = await checked(await fetch(url, { headers: headers(), signal: control.signal }));
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const { done, value } = await reader.read();
          if (done) break;
          const lines = (rest + value).split("\n\n");
          rest = lines.pop();
          if (lines.length) tell(JSON.parse(lines[lines.length - 1].slice("data: ".length)));
        }
      } catch (error) {
        if (control.signal.aborted) continue;
        lost(error);
        if (error instanceof Unauthorized) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  })();
  return () => { isOver = true; control.abort(); document.removeEventListener("visibilitychange", hide); };
}

/** Ask a worker or a host to leave. Only the admin token may. */
export async function drain(kind, name, adminToken) {
  const url = new URL(`/v1/${kind}s/${encodeURIComponent(name)}/drain`, location.origin);
  const response = await fetch(url, { method: "POST", headers: { Authorization: `Bearer ${adminToken}` } });
  await checked(response);
}
