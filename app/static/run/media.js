// What a run logged, a card for each key: pictures, tables, plots, histograms, clips and texts as of a step.
import { createAudio } from 'audio_clips'
import { createPlot } from 'media_plots'
import { createDataTable } from 'data_table'
import { count } from 'formats'
import { createHistograms } from 'histograms'
import { createLightbox } from 'lightbox'
import { createDocument, createImages, createText, createVideo } from 'media_images'
import { filesAt, lastUntil, stepsOf } from 'media_steps'
import { root } from 'root'

/** address: empty if the server does not have it. @typedef {{step: number, name: string, address: string}} MediaFile */
/**
 * What a kind draws into. label: its kind; say: a fact in the head; point: what stands there in its place, while it is
 * pointed at.
 * @typedef {{
 *   name: string,
 *   body: Found,
 *   label: (kind: string) => void,
 *   say: (fact: string) => void,
 *   point: (text: string) => void
 * }} MediaCard
 */
/**
 * Shows the files of a step; all: those of all steps.
 * @typedef {(files: MediaFile[], step: number, all: MediaFile[]) => unknown} ShowMedia
 */
/**
 * @typedef {{
 *   element: Found,
 *   kind: string,
 *   files: MediaFile[],
 *   steps: number[],
 *   at: number,
 *   shown: string,
 *   show: ShowMedia
 * }} Card
 */

const UNLINKED = 'media-steps-unlinked'
/** @type {Record<string, {label: string, create: (card: MediaCard) => ShowMedia}>} */
const KINDS = {
  image: { label: 'Images', create: createImages },
  table: { label: 'Table', create: createDataTable },
  plot: { label: 'Plot', create: createPlot },
  histogram: { label: 'Histogram', create: createHistograms },
  audio: { label: 'Audio', create: createAudio },
  video: { label: 'Video', create: createVideo },
  html: { label: 'Document', create: createDocument },
  text: { label: 'Text', create: createText },
}

/** @param {Found} row of the table of files @returns {MediaFile[]} */
const filesOf = ({ dataset }) =>
  JSON.parse(dataset.files).map(([step, id, name]) => ({
    step,
    name,
    address: id ? `${root}/runs/${document.querySelector('[data-run]').dataset.run}/artifacts/${id}/download` : '',
  }))

/**
 * @param {Found} section
 * @param {Found} table of the run's files, a row a key
 * @param {(count: number) => void} onCount
 */
export const createMedia = (section, table, onCount) => {
  const [grid, find, link, none] = ['[data-cards]', '[data-find-key]', '[data-link-steps]', '[data-no-match]'].map(
    (part) => section.querySelector(part),
  )
  /** @type {Map<string, Card>} */
  const cards = new Map()
  let isShown = false
  link.checked = localStorage.getItem(UNLINKED) === null
  link.addEventListener('change', () =>
    link.checked ? localStorage.removeItem(UNLINKED) : localStorage.setItem(UNLINKED, 'yes'),
  )

  /** @param {Card} card */
  const draw = (card) => {
    const { element, steps, files } = card
    const step = steps[card.at]
    const [slider, output] = [element.querySelector('footer input'), element.querySelector('footer output')]
    slider.setAttribute('max', String(steps.length - 1))
    slider.value = String(card.at)
    slider.disabled = steps.length < 2
    output.textContent = `step ${count(step)}`
    slider.setAttribute('aria-valuetext', output.textContent)
    element.querySelector('[data-by="-1"]').disabled = card.at === 0
    element.querySelector('[data-by="1"]').disabled = card.at === steps.length - 1
    const chosen = filesAt(files, step)
    const download = element.querySelector('a[download]')
    download.hidden = !chosen[0]?.address
    download.href = chosen[0]?.address
    const mark = `${step} ${card.kind === 'histogram' ? files.length : chosen.length}`
    if (!isShown || card.shown === mark) return
    card.shown = mark
    card.show(chosen, step, files)
  }
  /** @param {Card} card @param {number} at */
  const move = (card, at) => {
    card.at = Math.min(Math.max(at, 0), card.steps.length - 1)
    draw(card)
    if (!link.checked) return
    for (const other of cards.values()) {
      if (other === card) continue
      other.at = Math.max(lastUntil(other.steps, card.steps[card.at]), 0)
      draw(other)
    }
  }
  /** @param {string} name @param {string} kind @returns {Card} */
  const create = (name, kind) => {
    const element = /** @type {Found} */ (
      document.importNode(/** @type {any} */ (section.querySelector('template')).content, true).firstElementChild
    )
    const [title, tag, fact, slider] = ['h3', '.tag', '[data-fact]', 'footer input'].map((part) =>
      element.querySelector(part),
    )
    element.dataset.key = name
    element.setAttribute('aria-label', name)
    Object.assign(title, { textContent: name.replace(/\.(csv|txt|html|plot\.json|histogram\.json)$/, ''), title: name })
    tag.textContent = KINDS[kind].label
    slider.setAttribute('aria-label', `Step of ${name}`)
    for (const button of element.querySelectorAll('.tools > *, footer button'))
      button.setAttribute('aria-label', `${name}: ${button.title.toLowerCase().replace(/ \(.\)/, '')}`)
    let said = ''
    const show = KINDS[kind].create({
      name,
      body: element.querySelector('.body'),
      label: (text) => {
        tag.textContent = text
      },
      say: (text) => {
        said = text
        fact.textContent = text
      },
      point: (text) => {
        fact.textContent = text || said
      },
    })
    const card = { element, kind, files: [], steps: [], at: -1, shown: '', show }
    slider.addEventListener('input', () => move(card, Number(slider.value)))
    element.addEventListener('click', ({ target }) => {
      const button = /** @type {Found} */ (target).closest('button')
      if (button?.dataset.by) move(card, card.at + Number(button.dataset.by))
    })
    element.addEventListener('keydown', (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches('[type=search]')) return
      const { key } = event
      if (key === '[' || key === ']') move(card, card.at + (key === ']' ? 1 : -1))
      else return
      event.preventDefault()
      event.stopPropagation()
    })
    cards.set(name, card)
    grid.append(element)
    return card
  }
  const filter = () => {
    const words = find.value.toLowerCase().split(/\s+/)
    for (const [name, { element }] of cards)
      element.hidden = !words.every((word) =>
        `${name} ${element.querySelector('.tag').textContent}`.toLowerCase().includes(word),
      )
    none.hidden = [...cards.values()].some(({ element }) => !element.hidden)
    none.querySelector('[data-known]').textContent = `There are ${[...cards.keys()].join(', ')}.`
  }
  const clear = () => {
    find.value = ''
    filter()
  }
  find.addEventListener('input', filter)
  find.addEventListener('keydown', ({ key }) => {
    if (key === 'Escape') clear()
  })
  none.querySelector('button').addEventListener('click', () => {
    clear()
    find.focus()
  })
  createLightbox(grid, () =>
    [...cards.values()]
      .filter(({ kind }) => kind === 'image' || kind === 'table')
      .flatMap(({ files }) => files.filter(({ name, address }) => address && /\.(png|jpg|gif|webp)$/.test(name)))
      .toSorted((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }) || a.step - b.step)
      .map(({ name, step, address }) => ({ address, caption: `${name} · step ${count(step)}` })),
  )

  const refresh = () => {
    for (const row of table.querySelectorAll('tr[data-files]')) {
      const { key, kind } = row.dataset
      if (!(kind in KINDS)) continue
      const card = cards.get(key) ?? create(key, kind)
      const [step, wasLast] = [card.steps[card.at], card.at === card.steps.length - 1]
      card.files = filesOf(row)
      card.steps = stepsOf(card.files)
      card.at = wasLast ? card.steps.length - 1 : Math.max(lastUntil(card.steps, step), 0)
      draw(card)
    }
    filter()
    none.hidden ||= !cards.size
    onCount(cards.size)
  }
  return {
    refresh,
    /** Draw the cards, once their tab is open. */
    show: () => {
      if (isShown) return
      isShown = true
      for (const card of cards.values()) draw(card)
    },
  }
}
