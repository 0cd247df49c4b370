// The beginning of texts and tables that a run left, fetched when they come on screen; histograms are drawn.
import { still } from 'dom_updates'
import { number } from 'formats'

const BYTES = 4096

const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue
    observer.unobserve(target)
    fill(/** @type {Found} */ (target))
  }
})

/** @param {Found} pre */
const fill = async (pre) => {
  const answer = await fetch(pre.dataset.preview, { headers: { Range: `bytes=0-${BYTES - 1}` } })
  const whole = Number(answer.headers.get('Content-Range')?.split('/')[1] ?? 0)
  const text = answer.ok ? await answer.text() + (whole > BYTES ? '…' : '') : 'The file cannot be read.'
  const bars = drawn(text)
  still(() => bars ? pre.replaceChildren(bars) : (pre.textContent = text))
}

const SVG = 'http://www.w3.org/2000/svg'

/**
 * Return bars if a text is a logged histogram: its counts and range.
 * @param {string} text
 */
const drawn = (text) => {
  const histogram = parsed(text)
  if (!Array.isArray(histogram?.counts) || !histogram.counts.every(Number.isFinite)) return null
  const most = Math.max(1, ...histogram.counts)
  const svg = document.createElementNS(SVG, 'svg')
  svg.setAttribute('viewBox', `0 0 ${histogram.counts.length} 100`)
  svg.setAttribute('preserveAspectRatio', 'none')
  svg.setAttribute('role', 'img')
  const range = `from ${number(histogram.lowest)} to ${number(histogram.highest)}`
  const others = histogram.nonfinite ? `, ${histogram.nonfinite} not finite` : ''
  svg.setAttribute('aria-label', `Histogram ${range}${others}`)
  histogram.counts.forEach((count, x) => {
    const bar = document.createElementNS(SVG, 'rect')
    const height = 100 * count / most
    for (const [name, value] of Object.entries({ x, y: 100 - height, width: 0.9, height })) bar.setAttribute(name, String(value))
    svg.append(bar)
  })
  const caption = document.createElement('span')
  caption.textContent = `${range}${others}`
  const both = document.createElement('span')
  both.className = 'bars'
  both.append(svg, caption)
  return both
}

/** @param {string} text */
const parsed = (text) => {
  try { return JSON.parse(text) } catch { return null }
}

/** @param {ParentNode} root */
export const previewTexts = (root) => {
  for (const pre of root.querySelectorAll('[data-preview]:not([data-seen])')) {
    pre.dataset.seen = ''
    observer.observe(pre)
  }
}
