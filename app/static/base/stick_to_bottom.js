// Boxes whose last row is the newest stay scrolled to it, unless the user scrolled up.

/** Boxes that were scrolled away from their end. @type {WeakSet<Element>} */
const left = new WeakSet()

addEventListener('scroll', ({ target: box }) => {
  if (!(box instanceof Element)) return
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 30) left.delete(box)
  else left.add(box)
}, true)

/** Scroll in the next frame, when the page has been laid out. @param {ParentNode} root */
export const toNewest = (root) => requestAnimationFrame(() => {
  for (const box of root.querySelectorAll('[data-newest-last]')) {
    if (!left.has(box) && !box.matches(':hover, :focus-within')) box.scrollTop = box.scrollHeight
  }
})
