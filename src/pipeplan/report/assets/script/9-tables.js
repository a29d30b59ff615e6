// The comparison: a click on a heading sorts, a click on a planner shows its timeline.
const comparison = byId("comparison");
function sortBy(heading) {
  const column = heading.cellIndex, isNumber = heading.classList.contains("number");
  const before = heading.getAttribute("aria-sort");
  const up = before === null ? heading.dataset.first !== "descending" : before === "descending";
  for (const other of comparison.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const valueOf = (row) => row.cells[column]?.dataset.value ?? "";
  const rank = (first, second) => {
    const a = valueOf(first), b = valueOf(second);
    if (a === "" || b === "") return (a === "") - (b === ""); // rows without a value stay last
    const order = isNumber ? Number(a) - Number(b) : a.localeCompare(b);
    return up ? order : -order;
  };
  const body = comparison.tBodies[0];
  body.append(...[...body.rows].sort(rank));
}
if (comparison) {
  for (const heading of comparison.tHead.rows[0].cells) heading.querySelector("button").addEventListener("click", () => sortBy(heading));
  for (const link of comparison.querySelectorAll("a.to-timeline")) {
    link.addEventListener("click", () => { byId(link.hash.slice(1)).open = true; });
  }
}
