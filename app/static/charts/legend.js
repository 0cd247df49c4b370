// Which runs are shown, in which colours, and their values: a row a run, or a group of runs that have a mean.

import { valueAt } from 'crosshair'
import { meanOf } from 'error_band'
import { placesOf, strokes } from 'run_colors'

/** Groups runs by all settings in which they differ but the seed; comparison.py has it too. */
const BUT_SEED = 'except:seed'

export class Legend {
  /** @param {HTMLElement} article @param {string[]} ids @param {() => void} onChange */
  constructor(article, ids, onChange) {
    this.article = article
    this.ids = ids
    this.boxes = [...article.querySelectorAll('[data-legend] input')]
    /** @type {Record<string, string>} */
    this.labels = Object.fromEntries(this.boxes.map(({ value, dataset }) => [value, dataset.label]))
    const hidden = new Set((new URLSearchParams(location.search).get('hide') ?? '').split(','))
    for (const box of this.boxes) {
      box.checked = !hidden.has(box.value)
      box.addEventListener('change', onChange)
    }
    /** Index of each run's colour. @type {Map<string, number>} */
    this.places = placesOf(ids)
    this.own = this.places
    for (const cell of article.querySelectorAll('[data-legend] [data-figure]')) cell.dataset.latest = cell.innerHTML
    this.where = /** @type {HTMLElement} */ (article.querySelector('[data-where]'))
    this.isPointed = false
    /** Of each run its group, if groups have a mean. @type {Map<string, any>|null} */
    this.groups = null
  }

  get hidden() {
    return this.boxes.filter(({ checked }) => !checked).map(({ value }) => value)
  }

  /**
   * The runs to draw; by: a setting, of whose values each has a mean.
   * @param {Record<string, any[]>} differences
   * @param {string|undefined} by
   */
  shown(differences, by) {
    const paths = groupingOf(differences, by)
    const groups = new Map()
    const groupOf = (place) =>
      paths ? paths.map((path) => settingText(path, differences[path][place])).join(', ') || 'same settings' : null
    if (paths)
      this.ids.forEach((_, i) => {
        const key = groupOf(i)
        groups.set(key, groups.get(key) ?? groups.size)
      })
    const runs = this.ids.map((id, place) => {
      const group = groupOf(place)
      return { id, label: this.labels[id], place: this.own.get(id) ?? place, group, groupPlace: groups.get(group) ?? 0 }
    })
    this.places = new Map(runs.map((run) => [run.id, paths ? run.groupPlace : run.place]))
    this.paint()
    const hidden = new Set(this.hidden)
    const visible = runs.filter(({ id }) => !hidden.has(id))
    this.groups = paths ? new Map(runs.map(({ id, group }) => [id, group])) : null
    this.#showMeans([...groups], visible)
    // A run's ticks have its mean's colour, too.
    return paths ? visible.map((run) => ({ ...run, place: run.groupPlace })) : visible
  }

  /** Give all samples of lines on the page the colours that the lines have. */
  paint() {
    for (const sample of this.article.querySelectorAll('[data-swatch]')) {
      const name = strokes(this.places.get(sample.dataset.swatch) ?? 0)
      if (sample.getAttribute('class') !== name) sample.setAttribute('class', name)
    }
  }

  /** Highlight the run at the pointer. @param {string} [id] */
  point(id) {
    for (const box of this.boxes) box.closest('tr').classList.toggle('pointed', box.value === id)
  }

  /** Call `onRow` for each row that gets the pointer or the focus. @param {(id: string|undefined) => void} onRow */
  listen(onRow) {
    for (const box of this.boxes) {
      const row = box.closest('tr')
      for (const name of ['pointerenter', 'focusin']) row.addEventListener(name, () => onRow(box.value))
      for (const name of ['pointerleave', 'focusout']) row.addEventListener(name, () => onRow(undefined))
    }
  }

  /**
   * Show the values at a crosshair, or the latest.
   * @param {string} where
   * @param {number|null} x
   * @param {(name: string) => any[]} linesOf what was recorded of the runs of a panel
   */
  showAt(where, x, linesOf) {
    this.isPointed = x !== null
    this.where.textContent = where
    this.article.querySelector('[data-legend]').classList.toggle('at-crosshair', this.isPointed)
    for (const cell of this.article.querySelectorAll('[data-legend] [data-figure]')) {
      const line = x === null ? undefined : linesOf(cell.dataset.figure).find(({ run }) => run.id === cell.dataset.of)
      if (x !== null) cell.innerHTML = line && x <= line.x.at(-1) ? valueAt(line, x) : '–'
      else if (cell.innerHTML !== cell.dataset.latest) cell.innerHTML = cell.dataset.latest
    }
  }

  /**
   * Take the latest values of a page that came, and its figures if others are more relevant now.
   * @param {ParentNode} fresh
   */
  update(fresh) {
    const [names, later] = [this.article, fresh].map((part) => [
      ...part.querySelectorAll('[data-legend] th[data-name]'),
    ])
    names.forEach((head, i) => {
      const name = later[i]?.dataset.name
      if (!name || name === head.dataset.name) return
      for (const cell of this.article.querySelectorAll(
        `[data-legend] [data-figure="${CSS.escape(head.dataset.name)}"]`,
      ))
        cell.dataset.figure = name
      head.title = head.textContent = head.dataset.name = name
    })
    for (const cell of this.article.querySelectorAll('[data-legend] [data-figure]')) {
      const other = fresh.querySelector(
        `[data-figure="${CSS.escape(cell.dataset.figure)}"][data-of="${cell.dataset.of}"]`,
      )
      if (!other) continue
      cell.dataset.latest = other.innerHTML
      if (!this.isPointed && cell.innerHTML !== other.innerHTML) cell.innerHTML = other.innerHTML
    }
  }

  #showMeans(groups, visible) {
    const list = this.article.querySelector('[data-means]')
    list.hidden = !groups.length
    list.replaceChildren(
      ...groups.map(([name, place]) => {
        const item = document.createElement('li')
        const number = visible.filter(({ group }) => group === name).length
        item.innerHTML = `<svg class="${strokes(place)}" viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4h22"/></svg>`
        item.append(` ${name}, ${meanOf(number)}`)
        return item
      }),
    )
  }
}

/**
 * The settings of which each combination has a mean; undefined: runs are not averaged.
 * @param {Record<string, any[]>} differences
 * @param {string} [by]
 */
const groupingOf = (differences, by) => {
  if (by === BUT_SEED) return Object.keys(differences).filter((path) => path.split('.').at(-1) !== 'seed')
  return by !== undefined && differences[by] ? [by] : undefined
}

/** @param {string} path @param {any} value */
const settingText = (path, value) =>
  `${path} ${value === null || value === undefined ? 'off' : String(value).slice(0, 60)}`
