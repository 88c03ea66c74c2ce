// Frames each page at a width and says what a reader would stumble over; tests/browser.py gives GIVEN and reads the result.

const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const contrast = (a, b) => {
  const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
};

// [r, g, b, alpha] of whatever CSS calls a colour: a canvas knows all of its forms.
const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
const known = new Map();
const colour = (css) => {
  if (!known.has(css)) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    known.set(css, [r, g, b, a / 255]);
  }
  return known.get(css);
};
const over = ([r, g, b, a], under) => [r, g, b].map((v, i) => v * a + under[i] * (1 - a));

const ground = (element, view) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const found = colour(view.getComputedStyle(at).backgroundColor);
    if (found[3] > 0) layers.push(found);
    if (found[3] === 1) break;
  }
  return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
};

const seen = (page, body, view) => {
  const article = body.querySelector("article");
  const faint = [];
  const walker = body.ownerDocument.createTreeWalker(article, 4); // text
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!text || element.closest(".headerlink, script, style, .md-clipboard, .katex-mathml") || !element.offsetParent) continue;
    const style = view.getComputedStyle(element);
    const under = ground(element, view);
    const found = contrast(over(colour(style.color), under), under);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (found < (large ? 3 : 4.5)) faint.push(`${text.slice(0, 30)}: ${found.toFixed(2)}`);
  }
  const wide = [...article.querySelectorAll("pre > code")].filter((code) => code.scrollWidth > code.clientWidth + 1);
  return {
    page,
    title: body.ownerDocument.title,
    width: body.ownerDocument.documentElement.scrollWidth,
    headings: article.querySelectorAll("h1").length,
    formulas: article.querySelectorAll(".arithmatex").length,
    set: article.querySelectorAll(".arithmatex > .katex, .arithmatex > .katex-display").length,
    wrong: [...article.querySelectorAll(".katex-error, .katex [style*='#cc0000'], .katex [style*='204, 0, 0']")].map((e) => e.textContent.slice(0, 60)),
    pictures: [...article.querySelectorAll("img")].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src),
    unnamed: [...article.querySelectorAll("img")].filter((i) => !i.alt).map((i) => i.src),
    scrolled: wide.map((code) => code.textContent.slice(0, 40)),
    faint: [...new Set(faint)].slice(0, 8),
  };
};

const look = async () => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.style.cssText = `width:${GIVEN.width}px;height:900px;border:0`;
  const found = [];
  for (const page of GIVEN.pages) {
    await new Promise((done) => {
      frame.onload = done;
      frame.src = page;
    });
    const body = frame.contentDocument.body;
    body.setAttribute("data-md-color-scheme", GIVEN.scheme);
    frame.contentDocument.head.appendChild(frame.contentDocument.createElement("style")).textContent =
      "* { transition: none !important; }";
    await new Promise((done) => setTimeout(done, 50));
    found.push(seen(page, body, frame.contentWindow));
  }
  const text = document.createElement("pre");
  text.id = "found";
  text.textContent = JSON.stringify(found);
  document.body.replaceChildren(text);
};

addEventListener("load", look);
