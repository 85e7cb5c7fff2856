/* Typesets the formulas of a page with KaTeX, which lies beside this script. Pages without formulas do not load it. */
const here = new URL(".", document.currentScript.src);
const formulas = document.querySelectorAll(".arithmatex");
if (formulas.length) {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("katex/katex.min.css", here);
  document.head.append(style);
  const script = document.createElement("script");
  script.src = new URL("katex/katex.min.js", here);
  script.onload = () => {
    for (const formula of formulas) {
      const text = formula.textContent.trim();
      const displayMode = text.startsWith("\\[");
      katex.render(text.slice(2, -2), formula, { displayMode, throwOnError: false });
    }
  };
  document.head.append(script);
}
