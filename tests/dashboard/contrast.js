// Texts of the page whose contrast to what is behind them is less than 4.5, as WCAG 2 counts it.
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function numbers(colour) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function light(colour) {
  const [r, g, b] = colour.slice(0, 3).map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const bad = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !node.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
  const style = getComputedStyle(node);
  let below = node, paper = [0, 0, 0, 0];
  while (below && paper[3] === 0) { paper = numbers(getComputedStyle(below).backgroundColor); below = below.parentElement; }
  const [a, b] = [light(numbers(node.closest("svg") ? style.fill : style.color)), light(paper)].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < 4.5) bad.push([walker.currentNode.textContent.trim().slice(0, 40), contrast]);
}
return bad;
