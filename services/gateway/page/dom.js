// Elements. Text goes in as text, whoever wrote it.

export const byId = (id) => document.getElementById(id);

export function element(name, { className = "", text, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Sets a text only where it differs: what is selected stays so, and readers are told of changes alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
