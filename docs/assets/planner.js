// The planner page: shows plans that docs/_site/plans.py computed. Everything is on this page; nothing is sent anywhere.
(() => {
  const place = document.getElementById("planner");
  const table = window.cpsgdPlans;
  if (!place || !table) return;
  const element = (name, attributes, ...children) => {
    const drawn = ["svg", "line", "circle", "text", "polyline", "title"].includes(name);
    const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const number = (value) =>
    value >= 1000 ? Math.round(value).toLocaleString("en-GB") : String(Number(value.toPrecision(3)));
  const size = (bytes) =>
    bytes < 1000 ? `${bytes} bytes` : bytes < 1e6 ? `${number(bytes / 1e3)} kB` : `${number(bytes / 1e6)} MB`;

  const field = (label, id, values, chosen) => {
    const options = values.map((value, index) =>
      element("option", { value: index, ...(value === chosen ? { selected: "" } : {}) }, value.toLocaleString("en-GB")),
    );
    const select = element("select", { id }, ...options);
    return [element("label", { for: id }, label, select), select];
  };
  const [clientsLabel, clients] = field("Clients per round", "planner-clients", table.clients, 1000);
  const [dimLabel, dim] = field("Numbers per client", "planner-dim", table.dims, 30000);
  const [epsilonLabel, epsilon] = field("ε", "planner-epsilon", table.epsilons, 2);
  const secure = element("input", { id: "planner-secure", type: "checkbox" });
  const secureLabel = element("label", { for: "planner-secure" }, "Secure aggregation", secure);
  const said = element("p", { id: "planner-said", "aria-live": "polite" });
  const command = element("code", { id: "planner-command" });
  const chart = element("svg", { id: "planner-chart", viewBox: "0 0 400 230", role: "img" });
  const rows = element("tbody", {});
  const head = ["bits", "message", "squared error", "over the Gaussian's", "mechanism"];
  const heading = element("tr", {}, ...head.map((name) => element("th", {}, name)));
  const list = element("table", { id: "planner-table", class: "plans" }, element("thead", {}, heading), rows);

  // Both axes are logarithmic: bytes of a message, and error over that of exact Gaussian noise, up to 100 times.
  const draw = (shown, best) => {
    const visible = shown.filter((point) => point[3] <= 100);
    const [low, high] = [Math.log(visible[0][1]), Math.log(visible[visible.length - 1][1])];
    const ticks = [1, 1.1, 1.2, 1.5, 2, 5, 10, 20, 50, 100];
    const most = Math.max(...visible.map((point) => point[3]));
    const top = ticks.find((tick) => tick >= 1.2 && tick >= most);
    const lines = ticks.filter((tick) => tick <= top && (top <= 2 || tick === 1 || tick >= 2));
    const x = (point) => 44 + 346 * ((Math.log(point[1]) - low) / (high - low || 1));
    const y = (ratio) => 190 - 180 * (Math.log(Math.max(ratio, 1)) / Math.log(top));
    chart.replaceChildren(
      element("title", {}, "Error over the Gaussian's against the bytes of a message"),
      ...lines.flatMap((ratio) => [
        element("line", { x1: 40, x2: 394, y1: y(ratio), y2: y(ratio), class: "grid" }),
        element("text", { x: 36, y: y(ratio) + 4, "text-anchor": "end" }, `${ratio}×`),
      ]),
      element("polyline", { points: visible.map((point) => `${x(point)},${y(point[3])}`).join(" ") }),
      ...visible.map((point) =>
        element("circle", { cx: x(point), cy: y(point[3]), r: point === best ? 6 : 3, ...(point === best ? { class: "best" } : {}) },
          element("title", {}, `${point[0]} bits, ${size(point[1])}, ${number(point[3])}×`)),
      ),
      element("text", { x: 40, y: 208, "text-anchor": "start" }, size(visible[0][1])),
      element("text", { x: 394, y: 208, "text-anchor": "end" }, size(visible[visible.length - 1][1])),
      element("text", { x: 217, y: 224, "text-anchor": "middle" }, "bytes of a message"),
    );
  };

  const show = () => {
    const [c, d, e] = [clients, dim, epsilon].map((select) => Number(select.value));
    const { length: dims } = table.dims;
    const index = ((Number(secure.checked) * table.clients.length + c) * dims + d) * table.epsilons.length + e;
    const shown = table.plans[index];
    rows.replaceChildren();
    if (!shown.length) {
      said.textContent = "No plan keeps this. Take more clients or a larger ε.";
      command.textContent = "";
      chart.replaceChildren();
      return;
    }
    // The first within 10 % of exact Gaussian noise, or the most accurate.
    const best = shown.find((point) => point[3] <= 1.1) || shown.reduce((a, b) => (b[3] < a[3] ? b : a));
    const [bits, bytes, error, ratio] = best;
    const floats = 4 * table.dims[d];
    said.textContent =
      `${bits} ${bits === 1 ? "bit" : "bits"} per number: ${size(bytes)} from each client instead of ${size(floats)}. ` +
      `The mean is off by ${number(Math.sqrt(error))} where each client's vector has length 1 at most: ` +
      `${number(ratio)} times the squared error of exact Gaussian noise.`;
    command.textContent =
      `cpsgd plan --clients ${table.clients[c]} --dim ${table.dims[d]} --epsilon ${table.epsilons[e]} ` +
      `--delta ${table.delta} --bits ${bits}${secure.checked ? " --secure" : ""}`;
    for (const point of shown) {
      const [each, long, squared, over, mechanism] = point;
      const cells = [number(each), size(long), number(squared), `${number(over)}×`, mechanism];
      rows.append(element("tr", point === best ? { class: "best" } : {}, ...cells.map((cell) => element("td", {}, cell))));
    }
    draw(shown, best);
  };
  for (const input of [clients, dim, epsilon, secure]) input.addEventListener("change", show);
  const form = element("form", { id: "planner-form" }, clientsLabel, dimLabel, epsilonLabel, secureLabel);
  place.replaceChildren(form, said, chart, element("pre", {}, command), element("div", { class: "scrolls" }, list));
  show();
})();
