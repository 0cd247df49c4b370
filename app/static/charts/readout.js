// The strip above the charts of a run, which covers nothing: where somebody points, what happened at
// that step, and each line with its value there, or its latest; a line is hidden by its button.
import { count } from 'formats'
import { METRIC, position } from 'points'

const LABELS = { step: 'step', applied: 'applied', time: 'seconds' }

/** @typedef {{name: string, color: string, x: number[], y: (number|null)[], words?: (y: number) => string}} Told a line as it is drawn */

/** @param {number[]} xs @param {number} x @returns {number} index of the nearest */
const nearest = (xs, x) => {
  const i = position(xs, x)
  if (i === 0) return 0
  return i < xs.length && xs[i] - x < x - xs[i - 1] ? i : i - 1
}

/** What is drawn of a line at x, or before it, up to the next gap. @param {Told} line @param {number|null} x null: at its end */
const valueAt = ({ x: xs, y, words }, x) => {
  if (!xs.length) return '–'
  const value = y[x === null ? xs.length - 1 : nearest(xs, x)]
  if (value === null || value === undefined) return '–'
  return words ? words(value) : String(Number(value.toPrecision(5)))
}

/**
 * @param {HTMLElement} strip
 * @param {(hidden: string[]) => void} onHide is told the lines that are not to be drawn
 * @returns {{show: (composed: any, mode: string, pixel: number) => void, at: (x: number|null) => void}}
 */
export const createStrip = (strip, onHide) => {
  const [where, list] = ['where', 'lines'].map((name) => strip.querySelector(`[data-strip-${name}]`))
  const usual = where.textContent
  /** By line: its button, and of that the colour and the value. @type {Map<string, [HTMLButtonElement, HTMLElement, HTMLElement]>} */
  const buttons = new Map()
  /** @type {{lines: Told[], marks: {name: string, x: number[], text: string[]}[], hidden: string[]}} */
  let drawn = { lines: [], marks: [], hidden: [] }
  let [mode, pixel] = ['step', 0]
  /** @type {number|null} */
  let pointed = null

  const say = () => {
    const first = drawn.lines.find(({ x }) => x.length)
    const x = pointed === null || !first ? null : first.x[nearest(first.x, pointed)]
    // A mark is named at its own step, or where a pixel has several steps.
    const marks = x === null ? [] : drawn.marks.flatMap(({ name, x: xs, text }) => {
      const i = xs.length ? nearest(xs, x) : -1
      return i >= 0 && Math.abs(xs[i] - x) <= pixel ? [name === 'skipped' ? `skipped: ${text[i]}` : text[i]] : []
    })
    where.textContent = x === null ? usual : [`${LABELS[mode] ?? mode.slice(METRIC.length)} ${Number.isInteger(x) ? count(x) : Number(x.toPrecision(6))}`, ...marks].join(' · ')
    where.classList.toggle('marked', marks.length > 0)
    for (const line of drawn.lines) {
      const [, , value] = buttons.get(line.name) ?? []
      if (value) value.innerHTML = valueAt(line, x)
    }
  }
  /** @param {Told} line */
  const button = ({ name }) => {
    const [swatch, value] = [document.createElement('i'), document.createElement('b')]
    const made = document.createElement('button')
    made.type = 'button'
    made.title = `${name}: hide or show`
    made.append(swatch, ` ${name} `, value)
    made.addEventListener('click', () => {
      const hidden = new Set(drawn.hidden)
      if (!hidden.delete(name)) hidden.add(name)
      drawn = { ...drawn, hidden: [...hidden] } // the next press may come before it is drawn
      onHide(drawn.hidden)
    })
    buttons.set(name, [made, swatch, value])
    return made
  }

  return {
    show: (composed, newMode, newPixel) => {
      drawn = composed
      mode = newMode
      pixel = newPixel
      // One that comes is the last: nothing that is there moves.
      const lines = new Map(drawn.lines.map((line) => [line.name, line]))
      for (const [name, [made]] of buttons) {
        if (lines.has(name)) continue
        made.parentElement?.remove()
        buttons.delete(name)
      }
      for (const line of drawn.lines) {
        if (buttons.has(line.name)) continue
        const item = document.createElement('li')
        item.append(button(line))
        list.append(item)
      }
      for (const { name, color } of drawn.lines) {
        const [made, swatch] = buttons.get(name) ?? []
        made?.setAttribute('aria-pressed', String(!drawn.hidden.includes(name)))
        if (swatch) swatch.style.background = color
      }
      say()
    },
    at: (x) => {
      pointed = x
      say()
    },
  }
}
