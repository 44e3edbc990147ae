// Light or dark? As the system has it, unless somebody chose otherwise here. Runs before the page is drawn.
"use strict";
(() => {
  const root = document.documentElement;
  const chosen = localStorage.getItem("wise-atta.theme");
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const now = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
      root.dataset.theme = now === "dark" ? "light" : "dark";
      localStorage.setItem("wise-atta.theme", root.dataset.theme);
    });
  });
})();
