// Before the first paint: a chosen theme must not flash the other one.
"use strict";
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("trine-theme");
  } catch {
    // Storage may be off; then the system's choice holds.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
