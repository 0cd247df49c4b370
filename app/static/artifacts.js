// The beginning of texts that a recipe left, fetched when they come on screen.
import { still } from 'still'

const BYTES = 4096

const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue
    observer.unobserve(target)
    fill(target)
  }
})

/** @param {HTMLElement} pre */
const fill = async (pre) => {
  const answer = await fetch(pre.dataset.preview, { headers: { Range: `bytes=0-${BYTES - 1}` } })
  const whole = Number(answer.headers.get('Content-Range')?.split('/')[1] ?? 0)
  const text = answer.ok ? await answer.text() + (whole > BYTES ? '…' : '') : 'The file cannot be read.'
  still(() => { pre.textContent = text })
}

/** @param {ParentNode} root */
export const previewTexts = (root) => {
  for (const pre of root.querySelectorAll('[data-preview]:not([data-seen])')) {
    pre.dataset.seen = ''
    observer.observe(pre)
  }
}
