// Small helpers for the page's elements.

export const byId = (id) => document.getElementById(id);

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// A button by its visible sign; `key` names it across redraws, so that the focus stays on it. A button that has nothing
// to do stays focusable: were it disabled, the focus would be lost with the last step of a move.
export function iconButton(label, sign, key, act, isIdle = false) {
  const button = element("button", sign, { type: "button", class: "small", "aria-label": label, title: label, "data-key": key });
  if (isIdle) button.setAttribute("aria-disabled", "true");
  button.addEventListener("click", () => { if (!isIdle) act(); });
  return button;
}

// Redraws, and gives the focus back to the element with the same key, or to the first of `otherwise` that is there.
export function keepingFocus(draw, ...otherwise) {
  const focused = document.activeElement;
  const key = focused?.dataset?.key;
  draw();
  if (!key || focused.isConnected) return;
  for (const wanted of [key, ...otherwise]) {
    const found = document.querySelector(`[data-key="${CSS.escape(wanted)}"]`) ?? byId(wanted);
    if (found) return found.focus();
  }
}

// What a screen reader says about a change that is only seen otherwise.
export function say(message) {
  byId("said").textContent = message;
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toLocaleString("en", { maximumFractionDigits: 1 })}\u00a0%`;
export const list = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);
// The first of many, and how many more there are.
export const some = (words, most = 3) => list(words.length > most + 1 ? [...words.slice(0, most), `${words.length - most} more`] : words);
