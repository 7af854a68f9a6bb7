// Convert Markdown to DOM nodes. Text never becomes markup: every string is set as the text of a node. Links may
// have only the schemes http and https.

const NESTED_MAX = 6;  // levels of quotes and lists; deeper levels are plain text
const TABLE_RULE_MAX = 500;  // characters of a line, because TABLE_RULE takes quadratic time
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

// For each kind of block: return the number of its lines from line `at` on; 0 if no such block begins there.
const BLOCKS = {
  code(lines, at) {
    const fence = FENCE.exec(lines[at]);
    if (!fence) return 0;
    let end = at + 1;
    while (end < lines.length && !closes(lines[end], fence[1])) end++;
    return Math.min(end + 1, lines.length) - at;
  },
  heading: (lines, at) => (HEADING.test(lines[at]) ? 1 : 0),
  rule: (lines, at) => (RULE.test(lines[at]) ? 1 : 0),
  quote(lines, at) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    return end - at;
  },
  table(lines, at) {
    const rule = lines[at + 1];
    if (!lines[at].includes("|") || !rule || rule.length > TABLE_RULE_MAX || !TABLE_RULE.test(rule)) return 0;
    if (cellsOf(lines[at]).length !== cellsOf(rule).length) return 0;
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) end++;
    return end - at;
  },
  list(lines, at) {
    const first = ITEM.exec(lines[at]);
    if (!first) return 0;
    const ordered = /\d/.test(first[2]);
    let end = at + 1;
    for (let n = end; n < lines.length; n++) {
      const item = ITEM.exec(lines[n]), indented = /^\s{2,}\S/.test(lines[n]);
      const afterBlank = !lines[n - 1].trim();
      if (!lines[n].trim()) continue;
      if (item && item[1].length <= first[1].length && /\d/.test(item[2]) !== ordered) break;
      if (!item && !indented && (afterBlank || kindAt(lines, n, ["code", "heading", "rule", "quote", "table"]))) break;
      end = n + 1;
    }
    return end - at;
  },
  paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && !kindAt(lines, end, STARTS)) end++;
    return end - at;
  },
};
const STARTS = ["code", "heading", "rule", "quote", "table", "list"];

const closes = (line, fence) => line.trim().startsWith(fence) && /^[`~]+$/.test(line.trim());
const kindAt = (lines, at, kinds) => kinds.find(kind => BLOCKS[kind](lines, at));
const cellsOf = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(each => each.trim().replaceAll("\\|", "|"));

function blocksOf(text) {
  const lines = text.split("\n"), blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const kind = kindAt(lines, at, STARTS) || "paragraph", count = BLOCKS[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, at + count) });
    at += count;
  }
  return blocks;
}

// Comments, strings, numbers and common keywords of code get a colour, if the language is known.
const REMARKS = {
  "(?<![^\\s;&|(])#[^\\n]*": "bash docker dockerfile ini make makefile perl r rb ruby sh shell toml yaml yml zsh",
  "#[^\\n]*": "py python python3",
  "(?<!:)//[^\\n]*|/\\*[^]*?(?:\\*/|$)": "c c# c++ cpp cs dart go golang h java javascript js json jsonc jsx kotlin kt php rs rust "
    + "scala swift ts tsx typescript",
  "/\\*[^]*?(?:\\*/|$)": "css",
  "--[^\\n]*": "haskell hs lua sql",
};
const WORDS = "and|as|async|await|bool|boolean|break|case|catch|char|class|const|continue|def|default|del|do|done|double|elif|else|"
  + "end|enum|except|export|extends|fi|finally|float|fn|for|foreach|from|func|function|global|if|impl|import|in|int|interface|is|"
  + "lambda|let|local|long|match|mod|mut|new|not|null|None|of|or|package|pass|private|protected|pub|public|raise|return|self|"
  + "static|string|struct|super|switch|then|this|throw|trait|True|False|true|false|try|type|undefined|unless|use|using|var|void|"
  + "when|where|while|with|yield";
const SQL_WORDS = "all|alter|and|as|asc|between|by|case|create|default|delete|desc|distinct|drop|else|end|exists|from|group|having|"
  + "in|index|inner|insert|into|is|join|key|left|like|limit|not|null|on|or|order|outer|primary|right|select|set|table|then|union|"
  + "update|values|when|where|with";
// comments, attributes, entities and tags of markup
const MARKUP = /(<!--[^]*?(?:-->|$))|((?<==)"[^"]*"?|(?<==)'[^']*'?)|(&#?\w+;)|(<\/?[A-Za-z][\w:.-]*|\/?>)/g;
const COLOURS = new Map(Object.entries(REMARKS).flatMap(([remark, languages]) => {
  return languages.split(" ").map(language => {
    const isSql = language === "sql", words = isSql ? SQL_WORDS : WORDS;
    const long = language.startsWith("py") ? `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|` : "";
    const pattern = `(${remark})|(${long}"(?:\\\\.|[^"\\\\\\n])*"?|(?<![\\w&<])'(?:\\\\.|[^'\\\\\\n]){0,500}'|\`(?:\\\\.|[^\`\\\\])*\`?)|\\b(0x[\\da-f]+|\\d[\\d_]*(?:\\.\\d+)?(?:e[+-]?\\d+)?)\\b|\\b(${words})\\b`;
    return [language, new RegExp(pattern, isSql ? "gi" : "g")];
  });
}));
for (const language of ["htm", "html", "svelte", "svg", "vue", "xml"]) COLOURS.set(language, MARKUP);

function colouredCode(text, language) {
  const node = make("code"), colours = COLOURS.get(language);
  let at = 0;
  for (const found of colours ? text.matchAll(colours) : []) {
    const [all, remark, quoted, value] = found;
    node.append(text.slice(at, found.index), make("span", remark ? "remark" : quoted ? "quoted" : value ? "value" : "word", all));
    at = found.index + all.length;
  }
  node.append(text.slice(at));
  return node;
}

const NODES = {
  code(lines) {
    const [, fence, language] = FENCE.exec(lines[0]), isClosed = lines.length > 1 && closes(lines.at(-1), fence);
    const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    const figure = make("figure", "code"), caption = make("figcaption"), pre = make("pre");
    const copy = iconButton("copy", "Copy code", () => copyText(copy, text));
    caption.append(make("span", "", language || "text"), copy);
    pre.tabIndex = 0;
    pre.append(colouredCode(text, language.toLowerCase()));
    figure.append(caption, pre);
    return figure;
  },
  heading(lines) {
    const [, marks, text] = HEADING.exec(lines[0]), node = make(`h${Math.min(marks.length + 2, 6)}`);
    appendInline(node, text.trimEnd().replace(/\s#+$/, ""));
    return node;
  },
  rule: () => make("hr"),
  quote(lines, depth) {
    const node = make("blockquote");
    appendBlocks(node, lines.map(line => QUOTE.exec(line)[1]), depth);
    return node;
  },
  table(lines) {
    const box = make("div", "table"), table = make("table"), head = make("thead"), body = make("tbody");
    const aligned = cellsOf(lines[1]).map(each => (/^:.*:$/.test(each) ? "center" : each.endsWith(":") ? "right" : ""));
    const row = (line, tag) => {
      const tr = make("tr"), cells = cellsOf(line);
      aligned.forEach((cls, n) => { const cell = make(tag, cls); appendInline(cell, cells[n] || ""); tr.append(cell); });
      return tr;
    };
    head.append(row(lines[0], "th"));
    body.append(...lines.slice(2).map(line => row(line, "td")));
    table.append(head, body);
    box.append(table);
    box.tabIndex = 0;
    return box;
  },
  list(lines, depth) {
    const first = ITEM.exec(lines[0]), node = make(/\d/.test(first[2]) ? "ol" : "ul"), items = [];
    if (node.tagName === "OL") node.start = parseInt(first[2], 10);
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (item && item[1].length <= first[1].length + 1) items.push({ width: line.length - item[3].length, lines: [item[3]] });
      else items.at(-1).lines.push(line.replace(new RegExp(`^\\s{0,${items.at(-1).width}}`), ""));
    }
    for (const item of items) {
      const li = make("li", /^\[[ xX]\] /.test(item.lines[0]) ? "task" : "");
      item.lines[0] = item.lines[0].replace(/^\[([ xX])\] /, (all, mark) => (mark === " " ? "☐ " : "☑ "));
      appendBlocks(li, item.lines, depth);
      node.append(li);
    }
    return node;
  },
  paragraph(lines) {
    const node = make("p");
    lines.forEach((line, n) => { if (n) node.append(make("br")); appendInline(node, line.trimEnd()); });
    return node;
  },
};

function appendBlocks(into, lines, depth) {
  const blocks = depth < NESTED_MAX ? blocksOf(lines.join("\n")) : [{ kind: "paragraph", lines }];
  const isLine = blocks.length && blocks[0].kind === "paragraph" && blocks.slice(1).every(each => each.kind === "list");
  if (isLine) into.append(...NODES.paragraph(blocks.shift().lines).childNodes);
  into.append(...blocks.map(each => NODES[each.kind](each.lines, depth + 1)));
}

// The lengths are limited, because the time of these expressions grows with the square of the length.
const INLINE = new RegExp([
  /\\([\\`*_{}[\]()#+\-.!|~>])/,
  /(`{1,3})([^`]{1,2000}|[^`].{0,2000}?[^`])\2(?!`)/,
  /\*\*\*([^\s*](?:[^*]{0,2000}?[^\s*])?)\*\*\*/,
  /\*\*([^\s*](?:.{0,2000}?[^\s*])?)\*\*/,
  /(?<![\w*])\*([^\s*](?:[^*]{0,2000}?[^\s*])?)\*(?![\w*])/,
  /(?<!\w)_([^\s_](?:[^_]{0,2000}?[^\s_])?)_(?!\w)/,
  /~~([^~]{1,2000})~~/,
  /!?\[([^\][]{1,500})\]\((https?:\/\/[^\s()]{1,2000})\)/,
  /<(https?:\/\/[^\s<>]{1,2000})>/,
  /(https?:\/\/[^\s<>"')\]]{1,2000}[^\s<>"')\].,;:!?])/,
  /(<br ?\/?>)/,
].map(each => each.source).join("|"), "g");

function appendInline(into, text) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [all, escaped, , code, both, strong, em, em2, struck, label, address, bracketed, bare, newLine] = found;
    into.append(text.slice(at, found.index));
    at = found.index + all.length;
    if (escaped) into.append(escaped);
    else if (code) into.append(make("code", "", code.length > 2 ? code.replace(/^ (.*) $/, "$1") : code));
    else if (both) into.append(inlineNode("strong", `*${both}*`));
    else if (strong) into.append(inlineNode("strong", strong));
    else if (em || em2) into.append(inlineNode("em", em || em2));
    else if (struck) into.append(inlineNode("s", struck));
    else if (newLine) into.append(make("br"));
    else into.append(link(label || bracketed || bare, address || bracketed || bare));
  }
  into.append(text.slice(at));
}

function inlineNode(tag, text) {
  const node = make(tag);
  appendInline(node, text);
  return node;
}

function link(text, address) {
  const node = make("a", "", text);
  node.href = address;
  node.rel = "noreferrer noopener";
  node.target = "_blank";
  return node;
}

// Unchanged blocks keep their nodes, so that selected text stays selected while a reply streams.
const sources = new WeakMap();
function markdown(into, text) {
  const blocks = blocksOf(text);
  blocks.forEach(({ kind, lines }, n) => {
    const source = `${kind}\n${lines.join("\n")}`, old = into.children[n];
    if (old && sources.get(old) === source) return;
    const node = NODES[kind](lines, 0);
    sources.set(node, source);
    if (old) old.replaceWith(node); else into.append(node);
  });
  while (into.children.length > blocks.length) into.lastChild.remove();
  let level = 2;  // of the hidden heading before the reply; screen readers need levels without gaps
  for (const each of into.querySelectorAll("h3, h4, h5, h6")) {
    level = Math.min(Number(each.tagName[1]), level + 1);
    each.setAttribute("aria-level", level);
  }
}
