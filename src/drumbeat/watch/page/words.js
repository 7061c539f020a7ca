// Numbers in words. Text of the run is only ever set as text.

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  if (size >= 1000 && Number.isInteger(value)) return value.toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export function scaled(value, unit) {
  if (value === null || value === undefined) return ["–", ""];
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return [(value / size).toFixed(value / size >= 100 ? 0 : value / size >= 10 ? 1 : 2), letter + unit];
  }
  return [value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString(), unit];
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes} m ${String(rest).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} m` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function stepTime(seconds) {
  if (seconds === null || seconds === undefined) return ["–", ""];
  return seconds >= 1 ? [seconds.toFixed(2), "s"] : [(seconds * 1000).toFixed(1), "ms"];
}

export function clock(t) {
  return new Date(t * 1000).toLocaleTimeString("en-GB");
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Only what has changed is touched: anything else makes the browser lay the page out anew.
export function setText(box, text) {
  if (box.textContent !== text) box.textContent = text;
}

export function fillTable(table, columns, rows, onRow) {
  // Columns of which nothing is known are left out.
  const used = columns.map((_, index) => index).filter((index) => rows.some((row) => row[index] !== "-" && row[index] !== ""));
  const fill = (line, tag, texts) => {
    while (line.children.length > texts.length) line.lastChild.remove();
    while (line.children.length < texts.length) line.append(element(tag));
    texts.forEach((text, index) => setText(line.children[index], String(text)));
  };
  const head = table.tHead, body = table.tBodies[0];
  if (!head.firstChild) head.append(element("tr"));
  fill(head.firstChild, "th", used.map((index) => columns[index]));
  while (body.children.length > rows.length) body.lastChild.remove();
  while (body.children.length < rows.length) {
    const line = element("tr");
    if (onRow) {
      line.tabIndex = 0;
      line.addEventListener("click", () => onRow(line.row));
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); onRow(line.row); } });
    }
    body.append(line);
  }
  rows.forEach((row, number) => {
    const line = body.children[number];
    line.row = row;
    fill(line, "td", used.map((index) => row[index]));
  });
}
