// Columns that have no room: those that are left out, or lie beyond the edge of a table that scrolls.

/** Key of the column that was added last, which is scrolled into view. */
export const ADDED = 'halfstep-added-column'

/** @param {Found} list */
export const createColumnRoom = (list) => {
  const [scroller, note] = ['.table-scroll', '[data-columns-out]'].map((each) => list.querySelector(each))
  const heads = [...scroller.querySelectorAll('thead [data-column]')]
  const isUsual = scroller.matches('.usual')
  /** Whether a column is out of sight at the right. @param {HTMLElement} head */
  const isOut = (head) =>
    isUsual ? !head.offsetWidth : head.getBoundingClientRect().right > scroller.getBoundingClientRect().right + 1
  const show = () => {
    const isTable = heads.some((head) => head.offsetWidth) // on a phone each run is a card
    const out = isTable ? heads.filter(isOut) : []
    const names = out.map(({ textContent }) => textContent.trim())
    note.hidden = !out.length
    note.textContent = `${out.length} more ${out.length === 1 ? 'column' : 'columns'}${isUsual ? '' : ' →'}`
    note.title = isUsual ? `No room for ${names.join(', ')}: show all, and scroll` : `Scroll to ${names.join(', ')}`
    for (const choice of document.querySelectorAll('[data-choices] > *')) {
      const isLeftOut = isUsual && out.some(({ dataset }) => dataset.column === choice.dataset.choice)
      if (choice.hasAttribute('data-no-room') === isLeftOut) continue
      choice.toggleAttribute('data-no-room', isLeftOut)
      choice.classList.toggle('chosen', !isLeftOut)
      choice.querySelector('input').checked = !isLeftOut
    }
  }
  note.addEventListener('click', (event) => {
    if (isUsual) return
    event.preventDefault()
    // The first of them comes next to the pinned name, whole.
    const { left } = /** @type {Found} */ (heads.find(isOut)).getBoundingClientRect()
    scroller.scrollBy({ left: left - heads[0].getBoundingClientRect().right, behavior: 'smooth' })
  })
  const added = heads.find(({ dataset }) => dataset.column === sessionStorage.getItem(ADDED))
  sessionStorage.removeItem(ADDED)
  added?.scrollIntoView({ block: 'nearest', inline: 'nearest' })
  scroller.addEventListener('scroll', show)
  new ResizeObserver(show).observe(scroller)
}
