// Sets what pymdownx.arithmatex has marked, with the KaTeX that is shipped beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const text = place.textContent.trim(); // \( ... \) in a line, \[ ... \] by itself
    katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\["), throwOnError: false });
  }
});
